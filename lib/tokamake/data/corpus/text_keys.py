"""Keys of the first documents of a raw file, and which of them holds the text."""

import re
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from tokamake.data.corpus.documents import Fields, check_first_documents, place
from tokamake.data.readers import BadRecord, Input, RecordBlock, all_keys, open_input
from tokamake.errors import UserError

_NUM_DOCUMENTS = 200
_USUAL = ("text", "content", "raw_content", "body", "article", "document", "story", "code")
"""Keys that hold the text in most published corpora, the most usual first."""
_VALID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.]*")
"""Keys that the table of corpora can name."""
_WORD = re.compile(r"[!-~]*")
"""ASCII without spaces: an address, a hash or another identifier, and no text."""
_FEWEST_CHARACTERS = 20
"""Mean length of the texts under an unusual key, at least."""


class FirstDocuments(NamedTuple):
    """First documents of a raw file."""

    path: Path
    format: str
    texts: dict[str, list[str]]
    """Key → values that are texts; a key of other values has none."""
    number: int
    """Documents that were read; 0 also for a table without columns of texts."""
    is_empty: bool
    is_all: bool
    """Whether the file has no more documents."""
    bad: str = ""
    """Place and reason of the first bad document; empty: there is none."""


def first_documents(path: Path) -> FirstDocuments:
    """Read up to 200 documents of a raw file, with all their keys.

    Nested keys are joined by dots: `meta.text`. A format without keys of its own has `text`.

    Raises:
        UserError: the file or none of the documents can be read.
    """
    source = open_input(path)
    columns = all_keys(source)
    if columns == {"text": True}:  # the message names the keys that an archive has
        check_first_documents(path, Fields())
    texts: dict[str, list[str]] = {key: [] for key in columns}
    blocks = source.blocks(tuple(key for key, is_text in columns.items() if is_text))
    first = [*islice(blocks, 1)]
    bad: list[str] = []
    records = [*islice(_records(source, first, bad), _NUM_DOCUMENTS)]
    if bad and not records:
        raise UserError(bad[0])
    for record in records:
        for key, value in _flat(record):
            values = texts.setdefault(key, [])
            if isinstance(value, str):
                values.append(value)
    is_all = next(blocks, None) is None and all(
        len(block.records) == len(records) for block in first
    )
    is_empty = not records and (not columns or any(columns.values()))
    return FirstDocuments(
        path, source.format, texts, len(records), is_empty, is_all, next(iter(bad), "")
    )


def _records(
    source: Input, blocks: Iterable[RecordBlock], bad: list[str]
) -> Iterator[dict[str, Any]]:
    """Yield documents; add place and reason of each bad one to `bad`."""
    for block in blocks:
        for index, record in enumerate(block.records):
            if isinstance(record, BadRecord):
                bad.append(f"{place(source, block, index)}: {record.reason}")
            elif isinstance(record, dict):
                yield record


def _flat(record: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield keys and values, and `meta.text` for the key `text` in `meta`."""
    for key, value in record.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def guess_text_key(files: Iterable[FirstDocuments]) -> str:
    """Key that holds the text in the documents of all files; empty: there is none.

    It is a usual name, or the key with the longest texts. Most documents must have it.
    """
    files = [each for each in files if not each.is_empty]
    candidates: dict[str, float] = {}
    for key in files[0].texts if files else ():
        values = [each.texts.get(key, []) for each in files]
        is_usual = all(2 * len(v) > each.number for v, each in zip(values, files, strict=True))
        if is_usual and _VALID.fullmatch(key):
            words = [text for texts in values for text in texts]
            length = sum(map(len, words)) / len(words)
            is_text = not all(map(_WORD.fullmatch, words)) and length >= _FEWEST_CHARACTERS
            if is_text or (key in _USUAL and length):
                candidates[key] = length
    usual = next((key for key in _USUAL if key in candidates), "")
    return usual or max(candidates, key=candidates.__getitem__, default="")
