"""Sections of runs that finetune, detoxify or search."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.finished_run import make_results
from tests.support.html_page import Page
from tokamake import files
from tokamake.report.report import report

EPOCHS: list[dict[str, Any]] = [
    {"epoch": 1, "step": 10, "train_loss": 0.7, "scores": {"accuracy": 0.5, "f1": 0.25}},
    {"epoch": 2, "step": 20, "train_loss": 0.4, "scores": {"accuracy": 0.8125, "f1": 0.75}},
]
SCORES = {
    "task": "mrpc",
    "metrics": ["accuracy", "f1"],
    "rows": {"train": 1234, "validation": 56},
    "epochs": EPOCHS,
    "best": EPOCHS[1],
    "pretrained": "results/<bert>/training",
}
EVALUATION = {"scores": {"dev": {"rows": 56, "accuracy": 0.8125, "f1": 0.75}, "test": {"rows": 7}}}


def measures(maximum: float | None, probability: float | None, prompts: int) -> dict[str, Any]:
    return {
        "prompts": prompts,
        "expected_maximum_toxicity": maximum,
        "toxicity_probability": probability,
    }


NONE = measures(None, None, 0)
TEXTS = {"number": 20, "mean": 0.25, "sd": 0.1, "minimum": 0, "maximum": 0.875, "above_half": 0.1}
TOXICITY: dict[str, Any] = {
    "before": {"all": measures(0.75, 0.5, 1234), "toxic": NONE, "nontoxic": NONE, "perplexity": 9},
    "after": {"all": measures(0.5, 0.25, 1234), "toxic": NONE, "nontoxic": NONE, "perplexity": 10},
    "texts": {"texts": 21, "blank": 1, "scored": TEXTS, "kept": {**TEXTS, "number": 10}},
}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    return make_results(tmp_path / "results")


def texts(results: Path, section: str) -> list[str]:
    report(results)
    return Page(results / "report.html").sections[section]


def write_recall(path: Path, **changes: Any) -> None:
    """A manifest of `evaluate-retrieval`."""
    passage = {"id": 7, "title": "Ash <b>", "text": "Founded in 1200.", "score": 1.25}
    found = [{**passage, "hit": True, "answer": "1200"}, {**passage, "hit": False, "answer": ""}]
    sample = {"question": "When?", "answers": ["1200", "1201"], "rank": 1, "found": found}
    result = {
        "num_questions": 1234,
        "recall": {"1": 0.25, "20": 0.5},
        "found": {"searched": {"index": {"factory": "IVF4,Flat", "nprobe": 2}}},
        "samples": [sample],
        **changes,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(files.to_sealed_json(result))


def test_finetunings_have_scores_of_epochs_and_test_sets(results: Path) -> None:
    (results / "trial/finetune.json").write_text(json.dumps(SCORES))
    (results / "trial/evaluate_finetuned.json").write_text(json.dumps(EVALUATION))
    shown = texts(results, "finetuning")
    for text in ("0.8125", "2 (best)", "results/<bert>/training", "Scores of trial", "–"):
        assert text in shown
    assert "1,234 to train on, 56 to validate on" in shown


def test_detoxified_runs_have_scores_before_and_after(results: Path) -> None:
    (results / "trial/detoxify.json").write_text(json.dumps(TOXICITY))
    shown = "\n".join(texts(results, "detoxification"))
    for text in ("all prompts (1,234)", "0.750", "-0.250", "+1.00", "10.0%", "1 of 21 texts"):
        assert text in shown
    assert "nontoxic" not in shown


def test_searches_have_recall_and_passages(results: Path) -> None:
    write_recall(results / "trial/retrieval/recall/nq.json")
    missed = {"rank": None, "question": "When?", "answers": [], "found": []}
    numbers = {"1": 0.75, "20": 0.875}
    write_recall(results / "data/bm25/recall/nq.json", recall=numbers, samples=[missed])
    shown = texts(results, "retrieval")
    for text in ("recall@20", "25.0%", "87.5%", "this model: 1, BM25: not found", "1200; 1201"):
        assert text in shown
    page = (results / "report.html").read_text()
    for text in ("1,234 questions in nq", "IVF4,Flat, lists searched 2", "1. Ash &lt;b&gt;"):
        assert text in page
    assert "Founded in <ins>1200</ins>." in page
    assert page.count('class="sample hit"') == 1


def test_several_files_of_questions_are_named(results: Path) -> None:
    for name in "ab":
        write_recall(results / f"trial/retrieval/recall/{name}.json", found={"searched": {}})
    shown = texts(results, "retrieval")
    assert "b: this model" in shown
    assert "What the first questions found: b" in shown
    assert "exact search" in "".join(shown)
    assert "BM25" not in "".join(shown)
