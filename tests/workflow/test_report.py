"""Figures of the report, and the params of its rule."""

from types import SimpleNamespace
from typing import Any

from tests.support.paths import ROOT
from tokamake.workflow.report import FIGURES, figure_rules


def test_captions_exist_for_all_figures() -> None:
    assert len(FIGURES) > 5
    for figure in FIGURES:
        assert (ROOT / "workflow/rules" / figure.caption).read_text().strip()


def test_a_figure_is_described_in_words() -> None:
    figures = {figure.file: figure for figure in FIGURES}
    assert figures["learning_rate.svg"].subject == "learning rate"
    assert figures["learning_rate.svg"].category == "Training"


def test_several_runs_are_compared() -> None:
    config: Any = SimpleNamespace(runs={"a": 1})
    assert figure_rules(config) == ["plot"]
    config.runs["b"] = 2
    assert figure_rules(config) == ["plot", "compare"]
