"""Figures that the rule `plot` draws, and where Snakemake's report shows them."""

from pathlib import Path
from typing import NamedTuple

from tokamake.workflow.config import WorkflowConfig


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


def figure_rules(config: WorkflowConfig) -> list[str]:
    """Rules whose outputs the report shows; runs are compared if there are several."""
    return ["plot", "compare"] if len(config.runs) > 1 else ["plot"]
