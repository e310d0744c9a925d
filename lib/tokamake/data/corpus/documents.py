"""Texts of documents: which keys of a record are read, and whether they hold text.

Blocks come from `readers`; lists of texts go to `encode`, bad documents to the caller's policy.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from string import Formatter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokamake.data.readers import Bad, ByteRange, Input, RecordBlock, open_input
from tokamake.errors import UserError

_TYPES: dict[type, str] = {
    type(None): "null",
    bool: "true or false",
    int: "a number",
    float: "a number",
    list: "a list",
    dict: "an object",
}


class Fields(NamedTuple):
    """Which keys of a record make the texts of a document."""

    keys: tuple[str, ...] = ("text",)
    """Keys or columns; without a template, each is a text of its own."""
    template: str = ""
    """Joins keys to one text, as {title}\\n\\n{text}; a backslash with n or t is a line feed or
    tab, and {{ and }} are braces."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the texts of a document: the keys, or all keys in one with a template."""
        return ("_".join(self.keys),) if self.template else self.keys

    @property
    def read_keys(self) -> tuple[str, ...]:
        """Keys that a record must have.

        Raises:
            UserError: the template is none, or a key stands twice.
        """
        if self.template:
            return tuple(dict.fromkeys(_parse(self.template)[1]))
        if len(set(self.keys)) < len(self.keys) or not all(self.keys):
            raise UserError(f"text_key: {','.join(self.keys)}: name each key once")
        return self.keys

    def checked(self) -> "Fields":
        """These fields, if records can have such keys.

        Raises:
            UserError: as `read_keys`.
        """
        _ = self.read_keys
        return self


class Texts(NamedTuple):
    """Texts of the good documents of a block, and what is wrong with the others."""

    columns: tuple[Sequence[str], ...]
    """Texts for each of `Fields.names`, all of the same number."""
    kept: NDArray[np.int64]
    """(documents,) index in the block of each text, ascending."""
    bad: list[tuple[int, str]]
    """Index in the block, ascending, and reason with remedy, without the place."""


def split_keys(text_key: Iterable[str]) -> tuple[str, ...]:
    """Keys that a `text_key` names: one or more, repeated or with commas; "text" where it is empty.

    Commas stand in the table of corpora and in plans, and may in the option of a command.
    """
    return tuple(key for part in text_key for key in part.split(",")) or ("text",)


def texts(block: RecordBlock, fields: Fields) -> Texts:
    """Take the texts out of a block; a document that is bad for one key is bad for all."""
    keys = fields.read_keys
    records = block.records
    bad: list[tuple[int, str]] = []
    kept = np.arange(len(records), dtype=np.int64)
    columns: list[Sequence[str]] | None = [block.texts] if block.texts is not None else None
    columns = columns or _columns(records, keys)
    if columns is None:
        reasons = [
            _reason(record, keys, "row" if block.raw is None else "line") for record in records
        ]
        bad = [(index, reason) for index, reason in enumerate(reasons) if reason]
        kept = np.array([i for i, reason in enumerate(reasons) if not reason], np.int64)
        good: list[Any] = [records[index] for index in kept.tolist()]
        columns = [[record[key] for record in good] for key in keys]
    if fields.template:
        columns = [_join(columns, keys, fields.template)]
    return Texts(tuple(columns), kept, bad)


def read_texts(
    path: Path,
    key: str = "text",
    *,
    template: str = "",
    format: str = "",
    byte_range: ByteRange | None = None,
) -> Iterator[str]:
    """Yield the texts of a raw file; those of several keys (with commas) document by document.

    Raises:
        UserError: the file is missing, damaged or of no known format, or a document is bad.
    """
    fields = Fields(split_keys([key]), template)
    opened = open_input(path, byte_range=byte_range, format=format)
    for block in opened.blocks(fields.read_keys):
        columns, kept, bad = texts(block, fields)
        good = len(kept) if not bad else int(np.searchsorted(kept, bad[0][0]))
        for row in zip(*(column[:good] for column in columns), strict=True):
            yield from row
        if bad:
            index, reason = bad[0]
            raise UserError(f"{place(opened, block, index)}: {reason}")


def place(source: Input, block: RecordBlock, index: int) -> str:
    """Where document `index` of a block stands, for messages; see `Input.place`."""
    return source.place(int(block.numbers[index]), int(block.offsets[index]))


def _columns(records: Sequence[Any], keys: tuple[str, ...]) -> list[Sequence[str]] | None:
    """The values of each key, or None if any is missing or no text."""
    try:
        columns: list[Sequence[str]] = [[record[key] for record in records] for key in keys]
    except (KeyError, TypeError):  # TypeError: a `Bad`
        return None
    return columns if all(set(map(type, column)) <= {str} for column in columns) else None


def _reason(record: dict[str, Any] | Bad, keys: tuple[str, ...], unit: str) -> str:
    """What is wrong with a document, or an empty string."""
    if isinstance(record, Bad):
        return record.reason
    for key in keys:
        if key not in record:
            others = ", ".join(list(record)[:8]) or "nothing"
            return f'no key "{key}" (it has {others[:100]}); fix text_key or the {unit}'
        if not isinstance(record[key], str):
            what = _TYPES.get(type(record[key]), type(record[key]).__name__)
            return f'"{key}" holds {what}, not text; fix text_key or the {unit}'
    return ""


def _parse(template: str) -> tuple[str, list[str]]:
    """A template as pattern for the % operator, and the keys that fill it."""
    pattern, keys = "", []
    try:
        parts = list(Formatter().parse(template.replace("\\n", "\n").replace("\\t", "\t")))
    except ValueError as error:
        raise _wrong(template, str(error)) from None
    for literal, key, specification, conversion in parts:
        pattern += literal.replace("%", "%%")
        if key is None:
            continue
        if specification or conversion or not re.fullmatch(r"\w[\w.-]*", key) or key.isdigit():
            raise _wrong(template, f"{{{key}}} is no plain key")
        pattern += "%s"
        keys.append(key)
    if not keys:
        raise _wrong(template, "no key in braces")
    return pattern, keys


def _wrong(template: str, what: str) -> UserError:
    return UserError(
        f"template: {template}: {what}; write keys as {{title}} and {{text}}, "
        "braces as {{ and }}, line feeds as \\n"
    )


def _join(columns: list[Sequence[str]], keys: tuple[str, ...], template: str) -> list[str]:
    pattern, used = _parse(template)
    each = [columns[keys.index(key)] for key in used]
    return [pattern % row for row in zip(*each, strict=True)]
