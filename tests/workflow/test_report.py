"""Figures of the report, and the params of its rule."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tests.support.finetune_workspaces import make_finetune_workspace
from tests.support.paths import ROOT
from tests.support.workflow_configs import read_config, wildcards
from tests.support.workflows import CONFIG
from tokamake.workflow.config import read_workflow_config
from tokamake.workflow.report import (
    DETOXIFY_FIGURES,
    ENCODER_FIGURES,
    FIGURES,
    FINETUNE_FIGURES,
    RETRIEVAL_FIGURES,
    ReportRules,
    figure_outputs,
    figure_rules,
    plotted_encoders,
    plotted_runs,
)


def test_captions_exist_for_all_figures() -> None:
    assert len(FIGURES) > 5
    for figure in (
        *FIGURES,
        *ENCODER_FIGURES,
        *FINETUNE_FIGURES,
        *DETOXIFY_FIGURES,
        *RETRIEVAL_FIGURES,
    ):
        assert (ROOT / "workflow/rules" / figure.caption).read_text().strip()


def test_a_figure_is_described_in_words() -> None:
    figures = {figure.file: figure for figure in FIGURES}
    assert figures["learning_rate.svg"].subject == "learning rate"
    assert figures["learning_rate.svg"].category == "Training"


def test_several_runs_are_compared() -> None:
    config: Any = SimpleNamespace(runs=runs(a="causal"), finetuned={}, shared=shared())
    assert figure_rules(config) == ["plot"]
    config.runs = runs(a="causal", b="causal")
    assert figure_rules(config) == ["plot", "compare"]


def test_encoders_have_figures_of_their_own() -> None:
    config: Any = SimpleNamespace(
        runs=runs(a="causal", b="masked"), finetuned={"c": 1}, shared=shared()
    )
    assert plotted_runs(config) == ["a"]
    assert plotted_encoders(config) == ["b"]
    assert figure_rules(config) == ["plot", "plot_encoder", "plot_finetuned"]
    config.runs.pop("a")
    assert figure_rules(config) == ["plot_encoder", "plot_finetuned"]
    assert "accuracy.svg" in [figure.file for figure in ENCODER_FIGURES]
    assert "evaluation.html" not in [figure.file for figure in ENCODER_FIGURES]


def test_detoxified_runs_have_a_table() -> None:
    config: Any = SimpleNamespace(runs=runs(a="causal"), finetuned={}, shared=shared(detoxify=1))
    assert figure_rules(config) == ["plot", "plot_detoxified"]
    (output,) = figure_outputs(DETOXIFY_FIGURES, folder="results/{run}/detoxify")
    assert output == "results/{run}/detoxify/detoxification.html"


def test_searches_have_a_page() -> None:
    config: Any = SimpleNamespace(runs=runs(a="ict"), finetuned={}, shared=shared())
    assert figure_rules(config) == ["plot_encoder"]
    config.shared.retrieval = SimpleNamespace(questions={"nq": "nq.tsv"})
    assert figure_rules(config) == ["plot_encoder", "plot_retrieval"]


def shared(detoxify: Any = None) -> Any:
    """Sections that runs share."""
    return SimpleNamespace(detoxify=detoxify, retrieval=None)


def runs(**objectives: str) -> dict[str, Any]:
    """Runs with objectives."""
    return {
        name: SimpleNamespace(train=SimpleNamespace(objective=objective))
        for name, objective in objectives.items()
    }


@pytest.mark.usefixtures("workspace_here")
@pytest.mark.parametrize("is_main", [True, False])
def test_runs_that_the_next_report_leaves_out_are_named_once(
    is_main: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    snakemake: Any = SimpleNamespace(is_main_process=is_main, main_config={"run": "smoke"})

    def messages() -> list[str]:
        rules = ReportRules(read_config(), snakemake)
        assert (
            rules.config_text(wildcards()) == rules.config_text(wildcards()) == '{"run": "smoke"}'
        )
        return capsys.readouterr().err.splitlines()

    path = Path("results/config.json")
    path.parent.mkdir()
    assert messages() == []
    path.write_text(json.dumps(CONFIG))
    assert messages() == []
    path.write_text(json.dumps({**CONFIG, "run": "first"}))
    line = (
        "tokamake: results/report.html: shows first now; the next report has only the runs of this "
        "config. `tokamake compare` compares any runs"
    )
    assert messages() == [line] * is_main
    path.write_text(json.dumps({**CONFIG, "runs": "gone.tsv"}))
    assert messages() == []


def test_a_run_that_finetunes_is_in_the_next_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(make_finetune_workspace(tmp_path))
    sections = yaml.safe_load(Path("my.yaml").read_text())
    snakemake: Any = SimpleNamespace(is_main_process=True, main_config=sections)
    config = read_workflow_config(sections, ["my.yaml"], is_main_process=False)
    Path("results").mkdir()
    Path("results/config.json").write_text(json.dumps(sections))
    ReportRules(config, snakemake).config_text(wildcards())
    assert "shows" not in capsys.readouterr().err


@pytest.mark.usefixtures("workspace_here")
@pytest.mark.parametrize(
    ("resources", "options"),
    [({"tasks": "24"}, ["--set-resources=my_train:tasks=24"]), ({}, [])],
)
def test_the_report_reads_the_workflow_with_the_ranks_of_the_profile(
    resources: dict[str, str], options: list[str]
) -> None:
    snakemake: Any = SimpleNamespace(
        is_main_process=True,
        rule_resources={"train": resources}.__getitem__,
        renamed=lambda rule: f"my_{rule}",
    )
    assert ReportRules(read_config(), snakemake).ranks_options == options
