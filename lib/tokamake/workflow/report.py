"""Figures of runs, and Snakemake's report, which shows them."""

import json
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from tokamake import files
from tokamake.config.data_set import RUN
from tokamake.config.objective import objective_data
from tokamake.config.runs import read_runs
from tokamake.errors import UserError
from tokamake.preflight.planned import WorkflowConfig
from tokamake.workflow.snakemake_internals import Snakemake, in_report


class Figure(NamedTuple):
    """A figure or table of a run."""

    file: str
    category: str
    """Section of the report."""

    @property
    def caption(self) -> str:
        """Path of its caption, relative to the rules."""
        return f"../report/{Path(self.file).stem}.rst"

    @property
    def subject(self) -> str:
        """Its content in a few words."""
        return Path(self.file).stem.replace("_", " ")


FIGURES = (
    Figure("summary.html", "Run"),
    Figure("loss.svg", "Training"),
    Figure("learning_rate.svg", "Training"),
    Figure("throughput.svg", "Training"),
    Figure("corpora.html", "Data"),
    Figure("mixture.svg", "Data"),
    Figure("lengths.svg", "Data"),
    Figure("evaluation.html", "Model"),
    Figure("samples.html", "Model"),
)
"""Figures that the rule `plot` draws."""

ENCODER_FIGURES = (
    *(figure for figure in FIGURES if figure.category != "Model"),
    Figure("accuracy.svg", "Training"),
)
"""Figures that the rule `plot_encoder` draws."""


FINETUNE_FIGURES = (Figure("finetuning.html", "Finetuning"), Figure("scores.svg", "Finetuning"))
"""Figures that the rule `plot_finetuned` draws."""


DETOXIFY_FIGURES = (Figure("detoxification.html", "Detoxification"),)
"""Figures that the rule `plot_detoxified` draws."""


RETRIEVAL_FIGURES = (Figure("retrieval.html", "Retrieval"),)
"""Figures that the rule `plot_retrieval` draws."""


def figure_outputs(figures: Iterable[Figure], folder: str = f"{RUN}/plots") -> list[str]:
    """Figures of a `{run}` as outputs that the report shows."""
    return [
        in_report(
            f"{folder}/{figure.file}",
            category=figure.category,
            caption=figure.caption,
            labels={"run": "{run}", "shows": figure.subject},
        )
        for figure in figures
    ]


def plotted_runs(config: WorkflowConfig) -> list[str]:
    """Runs that the rule `plot` draws: of models that predict the next token."""
    runs = config.runs.items()
    return [name for name, run in runs if objective_data(run.train.objective).generates]


def plotted_encoders(config: WorkflowConfig) -> list[str]:
    """Runs that the rule `plot_encoder` draws."""
    plotted = plotted_runs(config)
    return [name for name in config.runs if name not in plotted]


def figure_rules(config: WorkflowConfig) -> list[str]:
    """Rules whose outputs the report shows; runs are compared if there are several."""
    plotted = plotted_runs(config)
    rules = ["plot"] if plotted else []
    rules += ["compare"] if len(plotted) > 1 else []
    rules += ["plot_encoder"] if plotted_encoders(config) else []
    rules += ["plot_finetuned"] if config.finetuned else []
    rules += ["plot_detoxified"] if config.shared.detoxify else []
    retrieval = config.shared.retrieval
    return rules + (["plot_retrieval"] if retrieval and retrieval.questions else [])


class ReportRules:
    """Params of the rule `report`."""

    def __init__(self, config: WorkflowConfig, snakemake: Snakemake) -> None:
        self._config = config
        self._snakemake = snakemake
        self._is_checked = not snakemake.is_main_process

    def config_text(self, wildcards: Any) -> str:  # noqa: ARG002
        """The whole config, so that Snakemake reads the same workflow again for its report.

        Snakemake calls this only if it builds the report.
        """
        if not self._is_checked:
            self._is_checked = True
            self._name_lost_runs()
        return json.dumps(self._snakemake.main_config, sort_keys=True)

    @property
    def ranks_options(self) -> list[str]:
        """The profile's ranks of a training as an option of Snakemake; empty without any."""
        tasks = self._snakemake.rule_resources("train").get("tasks")
        rule = self._snakemake.renamed("train")
        return [f"--set-resources={rule}:tasks={tasks}"] if tasks else []

    def _name_lost_runs(self) -> None:
        """Warn about runs of another config that the next report will leave out."""
        folder = Path(self._config.data_set.shared)
        path = folder / "config.json"
        if not path.is_file():
            return
        with suppress(UserError):  # of another version, or its table of runs is gone
            shown = read_runs(files.read_json(path, "remove it"), str(path))
            if lost := [run for run in shown if run not in self._config.all_runs]:
                print(
                    f"tokamake: {folder}/report.html: shows {', '.join(lost)} now; the next report "
                    "has only the runs of this config. `tokamake compare` compares any runs",
                    file=sys.stderr,
                )
