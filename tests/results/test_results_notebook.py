"""Notebooks of the docs: their cells run, in order, and draw what they say."""

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest

from tests.support.finished_run import make_results
from tests.support.paths import ROOT

NOTEBOOK = ROOT / "docs/notebooks/results.ipynb"


def code_cells() -> list[str]:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    cells = [each for each in notebook["cells"] if each["cell_type"] == "code"]
    assert not any(each["outputs"] for each in cells)  # of another machine
    return ["".join(each["source"]) for each in cells]


@pytest.fixture
def drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Variables of the notebook after its last cell, about two made-up runs."""
    make_results(tmp_path / "results", ["low", "high"])
    monkeypatch.chdir(tmp_path)
    mpl.use("Agg")
    variables: dict[str, Any] = {}
    for number, cell in enumerate(code_cells(), 1):
        exec(compile(cell, f"cell {number}", "exec"), variables)
    return variables


def test_the_notebook_draws_loss_evaluation_and_mixture(drawn: dict[str, Any]) -> None:
    from matplotlib import pyplot

    titles = [pyplot.figure(number).axes[0].get_title() for number in pyplot.get_fignums()]
    lines = [line.get_ydata() for line in drawn["axes"].get_lines()]
    pyplot.close("all")
    assert titles == ["Training loss", "Validation loss", "Held-out documents", "Mixture"]
    assert [values.tolist()[-1] for values in lines] == [3 + 4 / 50] * 2  # both runs
    assert drawn["evaluation"].loc["overall"].tolist() == [2.5, 2.5]
    assert drawn["mixture"].loc[("low", "a&b"), "epochs"] == pytest.approx(6)
    assert drawn["differing"] == ["train.optimizer.learning_rate"]


def test_a_folder_without_runs_has_empty_frames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "results").mkdir()
    monkeypatch.chdir(tmp_path)
    variables: dict[str, Any] = {}
    exec(code_cells()[0], variables)
    assert variables["runs"].empty
