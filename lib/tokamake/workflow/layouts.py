"""Layouts of runs against the ranks that the profile gives their jobs, before any job runs."""

import math
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokamake.errors import UserError
from tokamake.preflight.checks import check_ranks
from tokamake.preflight.packages import check_packages
from tokamake.workflow.config import WorkflowConfig
from tokamake.workflow.exit import exit_on_user_error, exit_with
from tokamake.workflow.paths import RUN
from tokamake.workflow.snakemake_internals import Snakemake


def num_training_ranks(snakemake: Snakemake) -> int | None:
    """Ranks that the profile gives a training; None: an expression, without a value so far."""
    tasks = str(snakemake.rule_resources("train").get("tasks", 1))
    return int(tasks) if tasks.isdecimal() else None


class LayoutCheck:
    """Layouts of all runs, and the number of ranks of a training."""

    def __init__(self, config: WorkflowConfig, snakemake: Snakemake) -> None:
        self._config = config
        resources = snakemake.rule_resources("train")
        self._is_main_process = snakemake.is_main_process
        self._num_ranks = num_training_ranks(snakemake)
        self._image = resources.get("container") or snakemake.default_resource("container")
        self._spare_nodes = str(resources.get("spare_nodes", 0))
        self._launch = Path(str(snakemake.default_resource("launch") or "").strip("'\""))

    @exit_on_user_error()
    def check(self, wildcards: Any) -> None:
        """Check that the packages of a run are there, and that the profile's ranks can train it.

        A run that is trained may have been trained with another profile.

        Raises:
            SystemExit: a package is missing, the ranks cannot share the model or its batches, or
                there are spare nodes on a site with one machine.
        """
        run, train = RUN.format(run=wildcards.run), self._config.runs[wildcards.run].train
        # In a job, nothing is planned.
        is_trained = Path(f"{run}/train{wildcards.segment}.json").exists()
        if not self._is_main_process or is_trained:
            return
        # Ranks in an image have packages of their own.
        if not (self._image or _has_image()):
            try:
                check_packages(train)
            except UserError as error:
                raise UserError(f"run {wildcards.run}: {error}") from None
        if self._num_ranks is None:
            return
        self._check_spare_nodes()
        try:
            check_ranks(train, self._num_ranks)
        except UserError as error:
            raise UserError(
                f"run {wildcards.run}: {error} (ranks: the resource tasks of the rule train)"
            ) from None

    def _check_causal(self, run: str) -> None:
        if (objective := self._config.runs[run].train.objective) != "causal":
            exit_with(
                f"run {run}: train.objective: {objective}: evaluate, evaluate_task and "
                "generate are for models that predict the next token; make train, export_hf, report"
            )

    def inference_options(self, wildcards: Any, output: Any, *, resources: Any) -> list[str]:  # noqa: ARG002
        """How the ranks of `evaluate` and `generate` share a model, as options of the commands.

        Tensor and pipeline parallel sizes are those of training, unless they do not fit the number
        of ranks. Data-parallel ranks share the weights (FSDP), unless each had all fp32 weights in
        training, too. As a function of the output, this makes no finished jobs run again: the
        number of ranks changes no result.

        Raises:
            SystemExit: the run trains an encoder, which predicts no next token.
        """
        self._check_causal(wildcards.run)
        train, tasks = self._config.runs[wildcards.run].train, str(resources.get("tasks", 1))
        if not tasks.isdecimal() or int(tasks) == 1:
            return []
        names = ("tensor_parallel_size", "pipeline_parallel_size")
        sizes = {name: getattr(train.parallel, name) for name in names}
        if int(tasks) % math.prod(sizes.values()):
            return ["--fsdp"]
        options = [f"--{name.replace('_', '-')}={size}" for name, size in sizes.items() if size > 1]
        return [*options, "--fsdp"] if train.zero_stage else options

    def evaluation_options(self, wildcards: Any, output: Any, *, resources: Any) -> list[str]:
        """`inference_options`, and the number of sequences per forward pass."""
        batch_size = self._config.runs[wildcards.run].evaluate.batch_size
        layout = self.inference_options(wildcards, output, resources=resources)
        return [*layout, f"--batch-size={batch_size}"]

    def _check_spare_nodes(self) -> None:
        if self._spare_nodes != "0" and self._launch.parent.name == "local":
            raise UserError(
                f"resources of the rule train: spare_nodes: {self._spare_nodes}: {self._launch} "
                "has one machine; leave it out, or use a cluster's profile"
            )


def _has_image() -> bool:
    """Whether ranks run in an image: the user file of an executor, or the environment, names it."""
    if os.environ.get("JOB_CONTAINER"):
        return True
    if find_spec("snakemake_executor_plugin_pbs") is None:
        return False
    from snakemake_executor_plugin_pbs.personal import has_value

    return has_value("container")
