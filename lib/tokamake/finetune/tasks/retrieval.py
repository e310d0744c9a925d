"""Question files as DPR has them (arXiv 2004.04906): which passage answers a question?

A JSON list, or JSON lines, of objects with question, positive_ctxs, hard_negative_ctxs and
negative_ctxs; a context has text, and a title that may be missing.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokamake.errors import UserError
from tokamake.train.objectives.retrieval.data import RetrievalPassage, RetrievalQuestion

OBJECTIVE = "retrieval"
HEAD = "none"
LABELS: tuple[str, ...] = ()
METRICS = (
    "mean_reciprocal_rank",
    "accuracy_at_1",
    "accuracy_at_5",
    "accuracy_at_20",
    "average_rank",
)
SETTINGS = {
    "hard_negatives": {
        "default": 1,
        "ge": 0,
        "description": "Hard negatives of each question in a batch. A question without any takes "
        "its other negatives.",
    },
    "positive": ("first", "drawn"),
    "score_scaling": {
        "default": False,
        "description": "Divide scores by the square root of the hidden size, as train.ict does.",
    },
}

_CHECKED_BYTES = 2**26
"""A dry run reads this much of the files; parsing takes a second."""


def read(path: Path, settings: Mapping[str, Any]) -> Iterator[RetrievalQuestion]:
    """Read the questions of a file."""
    for where, value in _objects(path):
        yield _question(where, value)


def check(paths: list[Path]) -> None:
    """Refuse files with broken rows, as far as a dry run has the time to read them."""
    left = _CHECKED_BYTES
    for path in paths:
        left -= path.stat().st_size
        if left < 0 and _is_list(path):
            return
        read_bytes = 0
        for where, value in _objects(path):
            _question(where, value)
            if left < 0 and (read_bytes := read_bytes + len(str(value))) > _CHECKED_BYTES:
                return


def _is_list(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(1024).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")


def _objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Objects of a file, each with its file and row."""
    from tokamake.finetune.tasks._table import json_lines

    if not _is_list(path):
        yield from json_lines(path)
        return
    import orjson

    try:
        values = orjson.loads(path.read_bytes().removeprefix(b"\xef\xbb\xbf"))
    except orjson.JSONDecodeError as error:
        raise UserError(f"{path}: not valid JSON ({error}); fix the file") from None
    for number, value in enumerate(values, 1):
        if not isinstance(value, dict):
            raise UserError(f"{path}: row {number}: not a JSON object; fix the row")
        yield f"{path}: row {number}", value


def _question(where: str, value: Mapping[str, Any]) -> RetrievalQuestion:
    text = value.get("question")
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"{where}: no question; add its text, or remove the row")
    if "positive_ctxs" not in value:
        raise UserError(
            f"{where}: has no positive_ctxs, only {', '.join(value)[:80]}; name a question file "
            "of DPR"
        )
    positives, hard, others = (
        _passages(where, key, value.get(key, []))
        for key in ("positive_ctxs", "hard_negative_ctxs", "negative_ctxs")
    )
    return RetrievalQuestion(text, positives, hard or others)


def _passages(where: str, key: str, values: Any) -> tuple[RetrievalPassage, ...]:
    if not isinstance(values, list):
        raise UserError(f"{where}: {key}: not a list; fix the row")
    return tuple(_passage(f"{where}: {key} {n}", value) for n, value in enumerate(values, 1))


def _passage(where: str, value: Any) -> RetrievalPassage:
    text, title = (value.get("text"), value.get("title")) if isinstance(value, dict) else ("", None)
    title = "" if title is None else title
    if not isinstance(text, str) or not text.strip() or not isinstance(title, str):
        raise UserError(f'{where}: not a passage; write {{"title": "…", "text": "…"}}')
    return RetrievalPassage(title, text)
