"""Runs that are longer than one job: the segments of their chain of jobs.

A job of a chain is named after the step that it ends at: train.500.json. Its checkpoint is in the
run's folder and is no output to Snakemake, which deletes outputs before it repeats a job.
"""

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tokamake import files
from tokamake.checkpoint.detect import open_any
from tokamake.checkpoint.native.resume_state import newest_state
from tokamake.config.data_set import RUN
from tokamake.errors import UserError
from tokamake.preflight.planned import WorkflowConfig
from tokamake.workflow.checkpoints import CheckpointRules

INITIAL_SEGMENT = ".0"
"""Segment name of the initial checkpoint; only the rule `evaluate` accepts it."""


class SegmentRules:
    """Segments of all runs. Wildcards are `run` and `segment`: .STEP, or empty for the last one."""

    def __init__(
        self,
        config: WorkflowConfig,
        planned: Callable[[str], str] | None,
        *,
        force_job: Callable[[str], None] | None = None,
        checkpoints: CheckpointRules | None = None,
    ) -> None:
        """Read how far each run has come.

        Args:
            planned: gives the path of a run's segments.json, once `plan_segments` wrote it; None in
                a job, which takes its controller's plan.
            force_job: makes Snakemake run the job that writes a file; None in a job.
            checkpoints: initial checkpoints of runs, for segment .0.
        """
        self._config, self._checkpoints = config, checkpoints
        self._planned, self._force_job = planned, force_job
        begun = {name: self._first_step(name) for name in config.runs}
        self.open_ended = [
            name
            for name, run in config.runs.items()
            if run.train.segment_steps and None in (run.train.num_steps, begun[name])
        ]
        """Runs whose length, or first step, is known once data exist: epochs of corpora decide."""
        self._known = {
            name: [] if first is None else config.runs[name].train.segments(first)
            for name, first in begun.items()
        }
        self._trained = {name: trained_steps(name) for name in config.runs}

    def _first_step(self, name: str) -> int | None:
        """Step that a chain of jobs begins at; None: the data of another run decide it."""
        run = self._config.runs[name]
        if not run.train.segment_steps or run.train.finetune is not False:
            return 0
        if run.model.parent:
            return self._config.runs[run.model.parent].train.num_steps
        assert run.model.folder, "checked by Config"
        try:
            return open_any(run.model.folder).progress.iteration
        except UserError as error:
            raise UserError(f"model.checkpoint: {error}") from None

    def _planned_segments(self, name: str) -> list[int]:
        """Last steps of the segments of an open-ended run."""
        path = Path(self._planned(name) if self._planned else f"results/{name}/segments.json")
        if not path.exists():
            return []
        plan = files.read_json(path, remedy := "remove it, to plan the segments again")
        ends = plan.get("segments") if isinstance(plan, dict) else None
        if not isinstance(ends, list):
            raise UserError(f"{path}: no list `segments`; {remedy}")
        return ends

    def ends(self, name: str) -> list[int]:
        """Last steps of all segments of a run but the last; most runs are one segment.

        A step that training has passed counts only while its checkpoint exists.
        """
        is_open = name in self.open_ended
        ends = self._planned_segments(name) if is_open else self._known[name]
        folder = Path(f"results/{name}/training")
        return [
            end
            for end in ends
            if end > self._trained[name] or (folder / f"global_step{end}").is_dir()
        ]

    def before(self, wildcards: Any) -> list[str]:
        """The file that the previous segment of the chain leaves.

        A finished run whose newest checkpoint is lost or damaged goes back, and trains again.
        """
        run = RUN.format(run=wildcards.run)
        product = f"{run}/train{wildcards.segment}.json"
        if self._force_job and not wildcards.segment and Path(product).exists():
            with suppress(UserError):  # there is no other checkpoint
                state, problem = newest_state(Path(run, "training"))
                if state and problem:
                    self._force_job(product)
        end = int(wildcards.segment[1:] or sys.maxsize)
        earlier = [step for step in self.ends(wildcards.run) if step < end]
        paths = [f"results/{wildcards.run}/train.{step}.json" for step in earlier[-1:]]
        return [path for path in paths if self._planned or Path(path).exists()]

    def end_option(self, wildcards: Any) -> list[str]:
        """The step at which a segment's job ends."""
        step = wildcards.segment[1:]
        return [f"--until-step={step}"] if step else []

    def evaluated_model(self, wildcards: Any) -> str:
        """Folder of the model to evaluate: exported, initial (.0) or of a segment."""
        if wildcards.segment == INITIAL_SEGMENT and self._checkpoints:
            return self._checkpoints.initial_folder(wildcards)
        run = RUN.format(run=wildcards.run)
        step = wildcards.segment[1:]
        return f"{run}/training/global_step{step}" if step else f"{run}/export"

    def evaluated_inputs(self, wildcards: Any) -> list[str] | str:
        """The file that exists once the model to evaluate does."""
        if wildcards.segment == INITIAL_SEGMENT and self._checkpoints:
            return self._checkpoints.start_inputs(wildcards)
        return f"{RUN}/train{{segment}}.json" if wildcards.segment else f"{RUN}/export"

    def evaluations(self, wildcards: Any) -> list[str]:
        """Evaluations after all segments of a run but the last, and before one that detoxifies."""
        start = [0] if self._config.shared.detoxify else []
        return [f"{RUN}/evaluate.{step}.json" for step in [*start, *self.ends(wildcards.run)]]

    def saved_since_start(self) -> list[str]:
        """One line a run that trained since the workflow started and did not end."""
        lines = []
        for name, before in self._trained.items():
            step = trained_steps(name)
            if step > before and step != self._config.runs[name].train.num_steps:
                lines.append(
                    f"tokamake: run {name} is saved at step {step:,}; "
                    "the same command continues from there"
                )
        return lines


def trained_steps(name: str) -> int:
    """The step at which training of a run continues."""
    latest = Path(f"results/{name}/training/latest")
    text = latest.read_text(errors="replace") if latest.is_file() else ""
    step = text.strip().removeprefix("global_step")
    return int(step) if step.isdecimal() else 0
