"""Question files of DPR are read as lists or lines; broken rows are refused by file and row."""

import json
from pathlib import Path
from typing import Any

import pytest

from tokamake.config.finetune import FinetuneTask
from tokamake.errors import UserError
from tokamake.finetune.tasks import retrieval
from tokamake.preflight.finetune import check_rows
from tokamake.train.objectives.retrieval.data import RetrievalPassage, RetrievalQuestion

ROW: dict[str, Any] = {
    "question": "who",
    "answers": ["me"],
    "positive_ctxs": [{"title": "A", "text": "a", "score": 1.0, "passage_id": "3"}],
    "hard_negative_ctxs": [{"title": None, "text": "b"}, {"text": "c"}],
    "negative_ctxs": [{"title": "D", "text": "d"}],
}
TASK = FinetuneTask(name="retrieval")


def read(path: Path) -> list[RetrievalQuestion]:
    return [*retrieval.read(path, TASK.own)]


@pytest.mark.parametrize("form", ["list", "lines"])
def test_lists_and_lines_have_the_same_questions(tmp_path: Path, form: str) -> None:
    path = tmp_path / "train.json"
    bare = {"question": "why", "positive_ctxs": ROW["positive_ctxs"]}
    others = {**ROW, "hard_negative_ctxs": []}
    rows = [ROW, bare, others]
    path.write_text(
        json.dumps(rows, indent=1) if form == "list" else "\n".join(map(json.dumps, rows))
    )
    first, second, third = read(path)
    assert first == RetrievalQuestion(
        "who", (RetrievalPassage("A", "a"),), (RetrievalPassage("", "b"), RetrievalPassage("", "c"))
    )
    assert second == RetrievalQuestion("why", (RetrievalPassage("A", "a"),), ())
    assert third.negatives == (RetrievalPassage("D", "d"),)
    check_rows(TASK, [path])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": " "}, r"row 2: no question; add its text"),
        ({"positive_ctxs": None}, r"row 2: positive_ctxs: not a list"),
        ({"positive_ctxs": "a"}, r"row 2: positive_ctxs: not a list; fix the row"),
        ({"negative_ctxs": [{"text": "a"}, {"title": "a"}]}, r"row 2: negative_ctxs 2: not a pas"),
        ({"hard_negative_ctxs": ["a"]}, r"row 2: hard_negative_ctxs 1: not a passage; write"),
    ],
)
def test_broken_rows_are_refused(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    path = tmp_path / "train.json"
    path.write_text(json.dumps([ROW, {**ROW, **row}]))
    with pytest.raises(UserError, match=message):
        check_rows(TASK, [path])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"question": "a"}', r"train.json: not valid JSON \("),
        ("[3]", r"train.json: row 1: not a JSON object"),
        ('{"question": "a", "label": 1}', r"train.json:1: has no positive_ctxs, only question, l"),
        ('{"question": "a"', r"train.json:1: not a JSON object"),
        ('["\xff"]', r"train.json: not valid JSON"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "train.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=message):
        check_rows(TASK, [path])


def test_a_dry_run_reads_only_the_beginning_of_large_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retrieval, "_CHECKED_BYTES", 100)
    path = tmp_path / "train.json"
    path.write_text(json.dumps([{}]) + " " * 100)
    check_rows(TASK, [path])
    path.write_text(f"{json.dumps(ROW)}\n" + "{}\n")
    check_rows(TASK, [path])
    path.write_text("{}\n" + f"{json.dumps(ROW)}\n")
    with pytest.raises(UserError, match=r"json:1: no question"):
        check_rows(TASK, [path])
