"""Texts of documents: which keys of a record form the text, and whether they hold text."""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from string import Formatter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokamake.data.readers import BadRecord, Input, RecordBlock, open_input, value_of
from tokamake.errors import UserError

_TYPE_NAMES: dict[type, str] = {
    type(None): "null",
    bool: "true or false",
    int: "a number",
    float: "a number",
    list: "a list",
    dict: "an object",
}


class Fields(NamedTuple):
    """The keys of a record that form the texts of a document."""

    keys: tuple[str, ...] = ("text",)
    """Keys or columns; without a template, each key gives one text."""
    template: str = ""
    """Joins keys to one text: {title}\\n\\n{text}; \\n is a line feed, \\t a tab, {{ and }} are
    braces."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the texts: the keys; with a template, one name of all keys."""
        return ("_".join(self.keys),) if self.template else self.keys

    @property
    def read_keys(self) -> tuple[str, ...]:
        if self.template:
            return tuple(dict.fromkeys(_parse_template(self.template)[1]))
        if len(set(self.keys)) < len(self.keys) or not all(self.keys):
            raise UserError(f"text_key: {','.join(self.keys)}: name each key once")
        return self.keys

    def checked(self) -> "Fields":
        """Return these fields; raise UserError if the keys or the template are invalid."""
        _ = self.read_keys
        return self


class Texts(NamedTuple):
    """Texts of the good documents of a block, and reasons for the bad ones."""

    columns: tuple[Sequence[str], ...]
    """Texts of the good documents for each of `Fields.names`."""
    kept: NDArray[np.int64]
    """(documents,) index in the block of each good document, ascending."""
    bad: list[tuple[int, str]]
    """Index in the block, ascending, and reason with remedy but without the place."""


def split_keys(text_key: Iterable[str]) -> tuple[str, ...]:
    """Return the keys of a `text_key`, an iterable of keys with or without commas.

    The default is "text". The table of corpora and plans have commas; a command also accepts a
    repeated option.
    """
    return tuple(key for keys in text_key for key in keys.split(",")) or ("text",)


def texts(block: RecordBlock, fields: Fields) -> Texts:
    """Return the texts of a block; a document that is bad for one key is bad for all."""
    keys = fields.read_keys
    records = block.records
    bad: list[tuple[int, str]] = []
    kept = np.arange(len(records), dtype=np.int64)
    # Fast paths: texts that the reader has ready, then blocks without bad documents.
    columns: list[Sequence[str]] | None = [block.texts] if block.texts is not None else None
    columns = columns or _columns(records, keys)
    if columns is None:
        reasons = [
            _reason(record, keys, "row" if block.raw is None else "line") for record in records
        ]
        bad = [(index, reason) for index, reason in enumerate(reasons) if reason]
        kept = np.array([index for index, reason in enumerate(reasons) if not reason], np.int64)
        good: list[Any] = [records[index] for index in kept.tolist()]
        columns = [[value_of(record, key) for record in good] for key in keys]
    if fields.template:
        columns = [_join(columns, keys, template=fields.template)]
    return Texts(tuple(columns), kept, bad)


def read_texts(
    path: Path, key: str = "text", *, template: str = "", format: str = ""
) -> Iterator[str]:
    """Yield the texts of a raw file; several keys (with commas) give several texts per document."""
    fields = Fields(split_keys([key]), template)
    source = open_input(path, format=format)
    for block in source.blocks(fields.read_keys):
        columns, kept, bad = texts(block, fields)
        # Yield the good documents before the first bad one, then stop.
        num_good = len(kept) if not bad else int(np.searchsorted(kept, bad[0][0]))
        for row in zip(*(column[:num_good] for column in columns), strict=True):
            yield from row
        refuse_bad(source, block, bad=bad)


def check_first_documents(
    path: Path, fields: Fields, *, format: str = "", keys_only: bool = False
) -> None:
    """Read about 0.5 MB of a raw file, and refuse it if a document there is bad.

    `keys_only`: if all of them lack a key, or hold no text there: the setting is wrong.
    """
    source = open_input(path, format=format)
    for block in islice(source.blocks(fields.read_keys), 1):
        _, kept, bad = texts(block, fields)
        is_readable = not any(isinstance(record, BadRecord) for record in block.records)
        if not len(kept) and (is_readable or not keys_only):
            refuse_bad(source, block, bad=bad)
        if bad and not keys_only:
            index, reason = bad[0]
            raise bad_document(place(source, block, index), reason)


def refuse_bad(source: Input, block: RecordBlock, *, bad: list[tuple[int, str]]) -> None:
    for index, reason in bad:
        raise UserError(f"{place(source, block, index)}: {reason}")


def bad_document(place: str, reason: str) -> UserError:
    """The error of a stage that stops at a bad document, because `on_bad_document` says so."""
    return UserError(f"{place}: {reason}, or set on_bad_document to quarantine")


def place(source: Input, block: RecordBlock, index: int) -> str:
    """Return the place of document `index` of a block, for messages; see `Input.place`."""
    return source.place(int(block.numbers[index]), int(block.offsets[index]))


def _columns(records: Sequence[Any], keys: tuple[str, ...]) -> list[Sequence[str]] | None:
    """Return the values of each key, or None if one is missing or not text."""
    try:
        columns: list[Sequence[str]] = [
            # A lookup of nested keys takes longer.
            [value_of(record, key) if "." in key else record[key] for record in records]
            for key in keys
        ]
    except (KeyError, TypeError):  # TypeError: a `BadRecord`
        return None
    # A set of types is faster than isinstance on each value.
    return columns if all(set(map(type, column)) <= {str} for column in columns) else None


def _reason(record: dict[str, Any] | BadRecord, keys: tuple[str, ...], unit: str) -> str:
    if isinstance(record, BadRecord):
        return record.reason
    for key in keys:
        try:
            value = value_of(record, key)
        except KeyError:
            # A key may be no Unicode: such reasons could not be written.
            names = ", ".join(list(record)[:8]).encode(errors="backslashreplace").decode()
            keys_in_record = names or "nothing"
            return f'no key "{key}" (it has {keys_in_record[:100]}); fix text_key or the {unit}'
        if not isinstance(value, str):
            kind = _TYPE_NAMES.get(type(value), type(value).__name__)
            return f'"{key}" holds {kind}, not text; fix text_key or the {unit}'
    return ""


def _parse_template(template: str) -> tuple[str, list[str]]:
    """Return a template as a pattern for the % operator, and the keys that fill it.

    str.format does not fit: it reads {meta.x} as an attribute, but a key may contain dots.
    """
    pattern, keys = "", []
    try:
        parts = list(Formatter().parse(template.replace("\\n", "\n").replace("\\t", "\t")))
    except ValueError as error:
        raise _template_error(template, str(error)) from None
    for literal, key, specification, conversion in parts:
        pattern += literal.replace("%", "%%")
        if key is None:
            continue
        if specification or conversion or not re.fullmatch(r"\w[\w.-]*", key) or key.isdigit():
            raise _template_error(template, f"{{{key}}} is not a plain key")
        pattern += "%s"
        keys.append(key)
    if not keys:
        raise _template_error(template, "no key in braces")
    return pattern, keys


def _template_error(template: str, reason: str) -> UserError:
    return UserError(
        f"template: {template}: {reason}; write keys as {{title}} and {{text}}, "
        "braces as {{ and }}, line feeds as \\n"
    )


def _join(columns: list[Sequence[str]], keys: tuple[str, ...], *, template: str) -> list[str]:
    pattern, template_keys = _parse_template(template)
    template_columns = [columns[keys.index(key)] for key in template_keys]
    return [pattern % row for row in zip(*template_columns, strict=True)]
