"""The page of recall: numbers of the model and of BM25, and passages with an answer."""

from pathlib import Path
from typing import Any

import pytest

from tokamake import files
from tokamake.errors import UserError
from tokamake.report.plot_retrieval import plot_retrieval


def result(**changes: Any) -> dict[str, Any]:
    """A manifest of `evaluate-retrieval`."""
    passage = {"id": 7, "title": "Ash <b>", "text": "Founded in 1200.", "score": 1.25}
    found = [{**passage, "hit": True, "answer": "1200"}, {**passage, "hit": False, "answer": ""}]
    sample = {"question": "When?", "answers": ["1200", "1201"], "rank": 1, "found": found}
    return {
        "num_questions": 1234,
        "recall": {"1": 0.25, "20": 0.5},
        "found": {"searched": {"index": {"factory": "IVF4,Flat", "nprobe": 2}}},
        "samples": [sample],
        **changes,
    }


def write(path: Path, **changes: Any) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(files.to_sealed_json(result(**changes)))
    return path


def test_the_page_has_recall_and_passages(tmp_path: Path) -> None:
    model = write(tmp_path / "recall/nq.json")
    bm25 = write(
        tmp_path / "bm25/nq.json",
        recall={"1": 0.75, "20": 0.875},
        samples=[{"rank": None, "question": "When?", "answers": [], "found": []}],
    )
    plot_retrieval([model], bm25=(bm25,), output=tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    for text in (
        "recall@20", "25.0%", "87.5%", "1,234 questions in nq", "IVF4,Flat, lists searched 2",
        "this model: 1, BM25: not found", "1. Ash &lt;b&gt;", "Founded in <ins>1200</ins>.",
        "1200; 1201",
    ):  # fmt: skip
        assert text in page
    assert page.count('class="sample hit"') == 1


def test_several_files_of_questions_are_named(tmp_path: Path) -> None:
    models = [write(tmp_path / f"recall/{name}.json", found={"searched": {}}) for name in "ab"]
    plot_retrieval(models, output=tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "b: this model" in page
    assert "What the first questions found: b" in page
    assert "exact search" in page
    assert "BM25" not in page


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a.json: .*make it with `tokamake evaluate-retrieval`"):
        plot_retrieval([tmp_path / "a.json"], output=tmp_path / "page.html")
