"""Settings of the config as options of commands and as `params` of rules."""

import json
import math
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

from tokamake.config.fields import Settings
from tokamake.config.objective import objective_data
from tokamake.config.training import without_added_defaults
from tokamake.preflight.planned import WorkflowConfig
from tokamake.workflow.exit import exit_with


def options(
    section: Settings, only: Iterable[str] | None = None, leave_out: Iterable[str] = ()
) -> list[str]:
    """Settings of a section as options of the stage; both have the same names.

    Args:
        only: names to take; None: all.
    """
    values = section.model_dump(
        mode="json",
        include=None if only is None else set(only),
        exclude=set(leave_out),
        exclude_none=True,
    )
    named = {name.replace("_", "-"): value for name, value in values.items()}
    return [
        f"--{name}={value}" if not isinstance(value, bool) else f"--{'' if value else 'no-'}{name}"
        for name, value in named.items()
    ]


class RunSettings:
    """Settings of the run that a job belongs to, as functions for `params`."""

    def __init__(self, config: WorkflowConfig) -> None:
        self._config = config

    def value(self, path: str) -> Callable[[Any], Any]:
        """A setting by its path in the config, such as train.seed."""
        get = attrgetter(path)
        return lambda wildcards: get(self._config.all_runs[wildcards.run])

    def section(self, name: str, leave_out: tuple[str, ...] = ()) -> Callable[[Any], str]:
        """A section as JSON. A function, since Snakemake would format the braces of a text."""

        def text(wildcards: Any) -> str:
            has_run = "run" in wildcards.keys()  # noqa: SIM118 - Snakemake's Wildcards is a list
            run = self._config.runs[wildcards.run] if has_run else self._config.shared
            section = run.model_dump(mode="json")[name]
            if name == "train":
                section = without_added_defaults(section)
            return json.dumps(
                {k: v for k, v in section.items() if k not in leave_out}, sort_keys=True
            )

        return text

    def options(self, section: str, only: Iterable[str]) -> Callable[[Any], list[str]]:
        """Some settings of a section as options of the stage."""
        return lambda wildcards: options(
            getattr(self._config.runs[wildcards.run], section), only=only
        )

    def generate_options(self, wildcards: Any) -> list[str]:
        """Prompts of the run's model, and how it continues them."""
        run = self._config.runs[wildcards.run]
        texts = [("prompts", run.prompts), ("stop", run.generate.stop)]
        return [
            *(f"--{name}={text}" for name, several in texts for text in several),
            *options(run.generate, leave_out=("prompts", "stop")),
            f"--seed={run.seed}",
        ]

    def _check_causal(self, run: str) -> None:
        objective = self._config.runs[run].train.objective
        if not objective_data(objective).generates:
            exit_with(
                f"run {run}: train.objective: {objective}: evaluate, evaluate_task and "
                "generate are for models that predict the next token; make train, export_hf, report"
            )

    def inference_options(self, wildcards: Any, output: Any, *, resources: Any) -> list[str]:  # noqa: ARG002
        """How the ranks of `evaluate` and `generate` share a model, as options of the commands.

        Tensor and pipeline parallel sizes are taken from training, if they fit the number of
        ranks. Data-parallel ranks share the weights (FSDP), unless each had all fp32 weights in
        training, too. As a function of the output, this makes no finished jobs run again: the
        number of ranks changes no result.
        """
        return self.layout(wildcards.run, resources)

    def layout(self, run: str, resources: Any) -> list[str]:
        """`inference_options` of a run."""
        self._check_causal(run)
        train, tasks = self._config.runs[run].train, str(resources.get("tasks", 1))
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
