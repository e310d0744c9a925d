"""Passages that are searched for answers: tsv files as DPR has them, or jsonl files."""

from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tokamake.errors import UserError
from tokamake.retrieval.embeddings import check_unique
from tokamake.retrieval.rows import is_jsonl, read_objects, read_rows

_COLUMNS = ("id", "text", "title")
_LARGEST_ID = 2**63 - 1
_FORM = "id<TAB>text<TAB>title"
_SWAPPED = "a question with its answers, not a passage; give the file as questions"


class EvidencePassage(NamedTuple):
    """A passage of a larger document."""

    id: int
    text: str
    title: str


def read_evidence(paths: Sequence[Path]) -> Iterator[EvidencePassage]:
    """Yield the passages of files in order.

    A tsv file begins with a header of the columns id, text and title, in any order. A jsonl file
    has objects with these keys. Titles may be missing.

    Raises:
        UserError: a row is broken, or a file has none.
    """
    for path in paths:
        is_empty = True
        for where, values in read_objects(path) if is_jsonl(path) else _rows(path):
            yield _passage(where, values)
            is_empty = False
        if is_empty:
            raise UserError(f"{path}: no passage; write rows {_FORM}, or leave the file out")


def check_evidence(paths: Sequence[Path]) -> None:
    """Read all passages once; raise UserError if a row is broken or an id occurs twice."""
    ids = array("q", (passage.id for passage in read_evidence(paths)))
    check_unique(np.array(ids, np.int64), ", ".join(map(str, paths)))


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    header: list[str] = []
    for where, row in read_rows(path):
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


def _passage(where: str, values: dict[str, Any]) -> EvidencePassage:
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
    return EvidencePassage(number, text, title)
