"""Mistakes in passages, questions and indexes that the dry run finds."""

import json
from pathlib import Path
from typing import Any

import pytest

from tokamake.config.retrieval import FaissSettings, RetrievalSettings
from tokamake.errors import UserError
from tokamake.retrieval import planned_search
from tokamake.retrieval.planned_search import (
    check_bm25,
    check_index,
    check_passages,
    check_questions,
)

PASSAGES = [{"id": number, "text": f"Text {number}.", "title": "A"} for number in range(9)]
QUESTIONS = [{"question": "What?", "answers": ["1"]}, {"question": "Why?", "answers": ["2"]}]


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def settings(**values: Any) -> RetrievalSettings:
    return RetrievalSettings(**{"passages": ["a"], "questions": "q.tsv", "top_k": 5, **values})


def test_right_files_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [jsonl(tmp_path / f"{name}.jsonl", PASSAGES) for name in "ab"]
    check_passages(paths, settings(top_k=18, index="IVF4,Flat"))
    check_questions({"q": jsonl(tmp_path / "q.jsonl", QUESTIONS)}, match="string")
    printed = capsys.readouterr()
    assert not printed.out
    assert "trains on 18 vectors; FAISS recommends 156" in printed.err


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"top_k": 10}, "^top_k: 10: there are only 9 passages; give at most as many"),
        (
            {"index": "IVF16,Flat"},
            "^index.factory: IVF16,Flat has 16 centroids, which need as many vectors; 9 of 9",
        ),
        (
            {"index": {"factory": "IVF8,Flat", "train_vectors": 5}},
            "^index.factory: IVF8,Flat has 8 .*; raise train_vectors",
        ),
    ],
)
def test_too_few_passages_are_named(tmp_path: Path, values: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_passages([jsonl(tmp_path / "a.jsonl", PASSAGES)], settings(**values))


def test_swapped_files_are_named(tmp_path: Path) -> None:
    passages = jsonl(tmp_path / "p.jsonl", PASSAGES)
    questions = jsonl(tmp_path / "q.jsonl", QUESTIONS)
    (tmp_path / "p.tsv").write_text("id\ttext\ttitle\n1\tText.\tA\n")
    (tmp_path / "q.tsv").write_text('What?\t["1"]\n')
    given = settings(top_k=1)
    for path, place in ((questions, r"q.jsonl:1: has the key question"), ("q.tsv", "q.tsv:1")):
        with pytest.raises(UserError, match=f"^passages: .*{place}: a question .* as questions"):
            check_passages([tmp_path / path], given)
    for path, place in ((passages, r"p.jsonl:1: has the key text"), ("p.tsv", "p.tsv:1: .*title")):
        with pytest.raises(UserError, match=rf"^questions.q: .*{place}: a passage.* as passages"):
            check_questions({"q": tmp_path / path}, match="string")


def test_broken_rows_and_missing_files_are_named(tmp_path: Path) -> None:
    rows = [*QUESTIONS, {"question": "Who?", "answers": "me"}]
    with pytest.raises(UserError, match=r"^questions.q: .*q.jsonl:3: answers are me"):
        check_questions({"q": jsonl(tmp_path / "q.jsonl", rows)}, match="string")
    with pytest.raises(UserError, match=r"^questions.q: .*gone.tsv: cannot be read"):
        check_questions({"q": tmp_path / "gone.tsv"}, match="string")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(UserError, match=r"^passages: .*empty.jsonl: no passage"):
        check_passages([tmp_path / "empty.jsonl"], settings())


def test_only_as_many_passages_are_read_as_needed(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [*PASSAGES, {"id": -1}])
    check_passages([path, path], settings(top_k=9))  # the job reads the broken row


@pytest.mark.extra("retrieval", "faiss")
def test_indexes_that_faiss_does_not_know_are_named() -> None:
    check_index(FaissSettings(factory="IVF4,Flat", nprobe=2), dimension=8)
    check_index(FaissSettings(factory="OPQ", nprobe=2), dimension=None)
    with pytest.raises(UserError, match=r"^index.factory: 'IVF4Flat': not an index of FAISS"):
        check_index(FaissSettings(factory="IVF4Flat"), dimension=8)
    with pytest.raises(UserError, match=r"^index.factory: 'IVF4,PQ3': not an index .* 8"):
        check_index(FaissSettings(factory="IVF4,PQ3"), dimension=8)
    with pytest.raises(UserError, match=r"^index.nprobe: an index Flat has no nprobe"):
        check_index(FaissSettings(factory="Flat", nprobe=2), dimension=8)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned_search, "find_spec", lambda _: None)
    command = r"pip install 'tokamake\[retrieval\]'`, or "
    with pytest.raises(UserError, match=f"^index: needs faiss, .*{command}remove the index"):
        check_index(FaissSettings(factory="Flat"), dimension=8)
    with pytest.raises(UserError, match=f"^bm25: needs bm25s, .*{command}set retrieval.bm25 to"):
        check_bm25()
