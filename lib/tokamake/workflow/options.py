"""Settings of the config as options of commands and as `params` of rules."""

import json
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

from tokamake.config.added_settings import without_added_defaults
from tokamake.config.fields import Settings
from tokamake.workflow.config import WorkflowConfig


def options(
    section: Settings, only: Iterable[str] | None = None, leave_out: Iterable[str] = ()
) -> list[str]:
    """Settings of a section as options of the stage; both have the same names.

    Args:
        section: of the config.
        only: names to take; None: all.
        leave_out: names to leave out.
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
