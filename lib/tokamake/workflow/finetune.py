"""Runs that finetune, as functions for rules. The wildcard is `run`."""

import json
from pathlib import Path
from typing import Any

from tokamake.config.finetune import TRAIN_SETTINGS, FinetuneSettings
from tokamake.config.training import LENGTHS
from tokamake.errors import UserError
from tokamake.preflight.checks import check_ranks
from tokamake.preflight.finetune import check_files
from tokamake.workflow.config import WorkflowConfig
from tokamake.workflow.exit import exit_on_user_error
from tokamake.workflow.paths import RUN
from tokamake.workflow.snakemake_internals import Snakemake

RULES = (
    *("prepare_finetune", "finetune", "export_finetuned", "evaluate_finetuned", "plot_finetuned"),
)
"""Rules whose runs finetune; the runs of other rules pretrain."""


class FinetuneRules:
    """Runs that finetune.

    Attributes:
        names: their names.

    Args:
        config: of the workflow.
        snakemake: of the workflow.
    """

    def __init__(self, config: WorkflowConfig, snakemake: Snakemake) -> None:
        self._config, self.names = config, [*config.finetuned]
        self._is_main_process = snakemake.is_main_process
        tasks = str(snakemake.rule_resources("finetune").get("tasks", 1))
        self._num_ranks = int(tasks) if tasks.isdecimal() else None

    @property
    def exported(self) -> list[str]:
        """Exports of all runs."""
        return [f"{RUN.format(run=name)}/export" for name in self.names]

    def _settings(self, wildcards: Any) -> FinetuneSettings:
        settings = self._config.finetuned[wildcards.run].finetune
        assert settings is not None, "such a run finetunes"
        return settings

    def settings(self, wildcards: Any) -> str:
        """The section `finetune` of a run as JSON."""
        return json.dumps(self._settings(wildcards).model_dump(mode="json"), sort_keys=True)

    def train_settings(self, wildcards: Any) -> str:
        """The settings of `train` that finetuning uses, as JSON; epochs give the length."""
        train = self._config.finetuned[wildcards.run].train
        values = train.model_dump(mode="json", include={*TRAIN_SETTINGS})
        return json.dumps({**values, **dict.fromkeys(LENGTHS)}, sort_keys=True)

    def data_inputs(self, wildcards: Any) -> list[str]:
        """Files of a run: it is prepared again if one of them changes."""
        return [str(path) for path in check_files(self._settings(wildcards))]

    @exit_on_user_error()
    def check(self, wildcards: Any) -> list[str]:
        """Check that the profile's ranks can train a run; no options.

        Raises:
            SystemExit: they cannot.
        """
        run, folder = self._config.finetuned[wildcards.run], RUN.format(run=wildcards.run)
        is_planned = self._is_main_process and not Path(f"{folder}/finetune.json").exists()
        if is_planned and self._num_ranks is not None:
            try:
                check_ranks(
                    run.train.model_copy(update={"rampup_batch_size": None}), self._num_ranks
                )
            except UserError as error:
                raise UserError(
                    f"run {wildcards.run}: {error} (ranks: the resource tasks of the rule finetune)"
                ) from None
        return []

    def task(self, wildcards: Any) -> str:
        """Name of the task of a run."""
        return self._settings(wildcards).task.name

    def evaluation_options(self, wildcards: Any) -> list[str]:
        """Test sets of a run and settings of its task, as options of `evaluate-finetuned`."""
        settings = self._settings(wildcards)
        sets = settings.test_files or {"validation": settings.validation_files}
        data = [f"--data={name}={path}" for name, paths in sets.items() for path in paths]
        return [*data, f"--settings={json.dumps(settings.task.own, sort_keys=True)}"]
