"""Passages that are searched for answers: tsv files as DPR has them, or jsonl files."""

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tokamake import files
from tokamake.data.readers import ByteRange
from tokamake.data.readers.jsonl import next_line
from tokamake.errors import UserError
from tokamake.retrieval.embeddings import check_unique
from tokamake.retrieval.rows import (
    WHOLE,
    FileLine,
    is_compressed,
    is_jsonl,
    read_objects,
    read_rows,
)

WINDOW_BYTES = 1 << 22
"""Bytes of a file whose passages are batched together. Byte ranges begin at multiples of it: so the
vectors are the same for any number of ranges."""

_COLUMNS = ("id", "text", "title")
_LARGEST_ID = 2**63 - 1
_FORM = "id<TAB>text<TAB>title"
_SWAPPED = "a question with its answers, not a passage; give the file as questions"


class EvidencePassage(NamedTuple):
    """A passage of a larger document."""

    id: int
    text: str
    title: str
    window: int
    """Number of the window of its file in which its line begins."""


def cut_passages(path: Path, shard_bytes: int) -> list[str]:
    """Byte ranges of a file, each START:END; a single empty one: the file is not cut.

    A longer file has the same ranges and further ones, of at least a window. Compressed files have
    none.
    """
    step = max(1, shard_bytes // WINDOW_BYTES) * WINDOW_BYTES
    starts = [*range(0, path.stat().st_size, step)]
    if len(starts) < 2 or is_compressed(path):
        return [""]
    return [f"{start}:{end}" for start, end in zip(starts, [*starts[1:], ""], strict=True)]


def read_evidence(
    paths: Sequence[Path], byte_range: ByteRange = WHOLE
) -> Iterator[EvidencePassage]:
    """Yield the passages of files in order.

    A tsv file begins with a header of the columns id, text and title, in any order. A jsonl file
    has objects with these keys. Titles may be missing. Of a byte range, passages count whose line
    begins in it.

    Raises:
        UserError: a row is broken, or a file has none.
    """
    for path in paths:
        is_empty = True
        read = read_objects if is_jsonl(path) else _rows
        for where, values in read(path, byte_range):
            yield _passage(where, values)
            is_empty = False
        if is_empty and byte_range == WHOLE:
            raise UserError(f"{path}: no passage; write rows {_FORM}, or leave the file out")


def check_evidence(paths: Sequence[Path], byte_range: ByteRange = WHOLE) -> None:
    """Read all passages once; raise UserError if a row is broken or an id occurs twice."""
    ids = array("q", (passage.id for passage in read_evidence(paths, byte_range)))
    check_unique(np.array(ids, np.int64), ", ".join(map(str, paths)))


def evidence_facts(paths: Sequence[Path], byte_range: ByteRange = WHOLE) -> dict[str, Any]:
    """Facts that decide the passages, for manifests: hashes of files, or of a range's lines."""
    if byte_range == WHOLE:
        return {"passages": [files.sha256(path) for path in paths]}
    (path,), (start, end) = paths, byte_range
    last = None if end is None else next_line(path, end)
    with path.open("rb") as file:
        hashed = hashlib.sha256(b"" if is_jsonl(path) else file.readline())  # the header
        file.seek(next_line(path, start))
        for line in file:
            if last is not None and file.tell() > last:
                break
            hashed.update(line)
    return {"passages": [hashed.hexdigest()], "first_byte": start}


def _rows(path: Path, byte_range: ByteRange) -> Iterator[tuple[FileLine, dict[str, Any]]]:
    header: list[str] = []
    if byte_range[0]:
        _, header = next(read_rows(path), (None, []))
    for where, row in read_rows(path, byte_range):
        if not header:
            header = row
            if not {"id", "text"} <= set(header) <= set(_COLUMNS):
                if len(header) == 2 and header[1].lstrip().startswith("["):
                    raise UserError(f"{where}: {_SWAPPED}")
                raise UserError(
                    f"{where}: the header is {' '.join(header)[:60]!r}; begin the file with {_FORM}"
                )
        elif len(row) != len(header):
            raise UserError(
                f"{where}: {len(row)} fields, but the header has {len(header)}; fix the row"
            )
        else:
            yield where, dict(zip(header, row, strict=True))


def _passage(where: FileLine, values: dict[str, Any]) -> EvidencePassage:
    if "question" in values and "text" not in values:
        raise UserError(f"{where}: has the key question: {_SWAPPED}")
    try:
        number = int(values.get("id", ""))
    except (TypeError, ValueError):
        number = -1
    if not 0 <= number <= _LARGEST_ID or isinstance(values["id"], bool | float):
        raise UserError(
            f"{where}: the id is {str(values.get('id'))[:40]!r}; give each passage a whole number"
        )
    text, title = values.get("text"), values.get("title", "")
    if not isinstance(text, str) or not isinstance(title, str):
        raise UserError(f"{where}: text or title is not a text; fix the row")
    return EvidencePassage(number, text, title, where.offset // WINDOW_BYTES)
