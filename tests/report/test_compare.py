"""Runs beside each other: what came of each, what they differ in, and nothing that they share."""

import json
from pathlib import Path

import pytest
import yaml

from tests.report.test_plot import Page
from tests.support.finished_run import RUN, TRAINED, metric, scores, write_index
from tokamake.errors import UserError
from tokamake.report.compare import compare


def finished(folder: Path, name: str, rate: float, drawn: int, **sets: float) -> Path:
    """Write a synthetic run whose last validation losses are `sets`."""
    (folder / name / "training").mkdir(parents=True)
    train = {**RUN["train"], "optimizer": {"learning_rate": rate}}  # type: ignore[dict-item]
    index = {"index": str(folder / name / "index"), "output": f"{name}/training"}
    run = {**RUN, **index, "run": name, "checkpoint": f"{name}-init", "train": train}
    measured = [{"step": 0, **dict.fromkeys(sets, 7.0)}, {"step": 50, **sets}]
    lines = [metric(step, 3 + 4 / step) for step in (10, 50)] + measured
    files = {
        "run.yaml": yaml.safe_dump(run),
        "train.json": json.dumps({**TRAINED, "validation_losses": measured[1:]}),
        "evaluate.json": json.dumps({"overall": scores(2.5)}),
        "training/metrics.jsonl": "".join(json.dumps(line) + "\n" for line in lines),
    }
    for file, text in files.items():
        (folder / name / file).write_text(text)
    write_index(folder / name / "index", {"a-0": ("a", 9, drawn), "b-0": ("b", 9, 100 - drawn)})
    return folder / name


def test_the_page_shows_results_and_differences(tmp_path: Path) -> None:
    first = finished(tmp_path, "first", 1e-3, 25, validation_loss=3.25)
    second = finished(tmp_path, "<second>", 2e-4, 50, validation_loss=3.5)
    compare(first, second, output=tmp_path / "out")
    page = Page(tmp_path / "out/runs.html")
    cut = page.texts.index("What differs")
    results = page.texts[2:cut]
    assert results[7:14] == ["first", "50", "12,800", "3.1234", "3.2500", "2.5000", "2.5000"]
    assert results[18] == "3.5000"
    assert page.texts[cut + 1 :] == [
        *("run", "train.optimizer.learning_rate", "share of a", "share of b"),
        *("first", "0.001", "25.0%", "75.0%"),
        *("<second>", "0.0002", "50.0%", "50.0%"),
    ]  # fmt: skip
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    compare(first, second, output=tmp_path / "out")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_losses_are_from_a_split_that_all_runs_have(tmp_path: Path) -> None:
    figures = {}
    for name, sets in {
        "shared": (
            {"validation_loss/hard": 3.0, "validation_loss/x": 1.0},
            {"validation_loss/hard": 2.0},
        ),
        "none": ({"validation_loss/x": 3.0}, {"validation_loss/y": 3.0}),
    }.items():
        runs = [finished(tmp_path / name, str(n), 1e-3, 5, **each) for n, each in enumerate(sets)]
        compare(*runs, output=tmp_path / name / "out")
        figures[name] = (tmp_path / name / "out/losses.svg").read_text()
    assert "Validation loss" in figures["shared"]
    assert "Training loss" in figures["none"]


def test_mistakes_are_reported(tmp_path: Path) -> None:
    run = finished(tmp_path, "a", 1e-3, 5, validation_loss=1.0)
    with pytest.raises(UserError, match="nothing to compare with; give the folders of two or more"):
        compare(run, output=tmp_path / "out")
    (run / "evaluate.json").touch()
    with pytest.raises(UserError, match=r"b: no such run; finished runs in .* are a; fix the path"):
        compare(run, tmp_path / "b", output=tmp_path / "out")
    (tmp_path / "b").mkdir()
    with pytest.raises(
        UserError, match=r"b: not a finished run: there is no run.yaml, which `resolve` writes"
    ):
        compare(run, tmp_path / "b", output=tmp_path / "out")
    assert not (tmp_path / "out").exists()
