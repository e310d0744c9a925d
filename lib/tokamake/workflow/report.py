"""Results that the page report.html shows."""

from types import SimpleNamespace
from typing import Any

from tokamake.config.data_set import RUN
from tokamake.config.objective import objective_data
from tokamake.preflight.planned import WorkflowConfig
from tokamake.workflow.retrieval import RetrievalRules
from tokamake.workflow.segments import SegmentRules
from tokamake.workflow.tasks import TaskRules


class ReportRules:
    """Inputs of the rule `report`."""

    def __init__(
        self,
        config: WorkflowConfig,
        *,
        segments: SegmentRules,
        tasks: TaskRules,
        retrieval: RetrievalRules,
    ) -> None:
        self._config = config
        self._segments, self._tasks, self._retrieval = segments, tasks, retrieval

    def results(self, wildcards: Any) -> list[str]:  # noqa: ARG002
        """Results of all runs: data, scores, samples, finetunings and searches."""
        runs = self._config.runs
        files = [self._config.data_set.metadata] if runs else []
        files += [path for run in runs for path in self._of_run(run)]
        for run in self._config.finetuned:
            folder = RUN.format(run=run)
            files += [f"{folder}/finetune.json", f"{folder}/evaluate_finetuned.json"]
        if self._config.shared.retrieval:
            files += self._retrieval.products
        return files

    def segment_scores(self, wildcards: Any) -> list[str]:  # noqa: ARG002
        """Scores after each segment but the last.

        A dry run before the data exist does not know them. As inputs of their own, they hide no
        other file from it.
        """
        paths = []
        for name, run in self._config.runs.items():
            if objective_data(run.train.objective).generates:
                named = SimpleNamespace(run=name)
                scores = [*self._segments.evaluations(named), *self._tasks.segment_scores(named)]
                paths += [path.format(run=name) for path in scores]
        return paths

    def _of_run(self, run: str) -> list[str]:
        """Training of a run; scores and samples, if its model predicts the next token."""
        names = ["index/index.json", "train.json"]
        if objective_data(self._config.runs[run].train.objective).generates:
            names += ["evaluate.json", "samples.json"]
        paths = [f"{RUN}/{name}" for name in names]
        if "evaluate.json" in names:
            paths += self._tasks.scores(SimpleNamespace(run=run))
        if self._config.shared.detoxify:
            paths.append(f"{RUN}/detoxify.json")
        return [path.format(run=run) for path in paths]
