"""Runs that finetune, as functions for rules. The wildcard is `run`."""

import json
from typing import Any

from tokamake.config.data_set import RUN
from tokamake.config.finetune import TRAIN_SETTINGS, FinetuneSettings
from tokamake.config.training import LENGTHS
from tokamake.preflight.finetune import check_files
from tokamake.preflight.planned import WorkflowConfig

RULES = (*("prepare_finetune", "finetune", "export_finetuned", "evaluate_finetuned"),)
"""Rules whose runs finetune; the runs of other rules pretrain."""


class FinetuneRules:
    """Runs that finetune; `names` are their names."""

    def __init__(self, config: WorkflowConfig) -> None:
        self._config, self.names = config, [*config.finetuned]

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

    def task(self, wildcards: Any) -> str:
        """Name of the task of a run."""
        return self._settings(wildcards).task.name

    def evaluation_options(self, wildcards: Any) -> list[str]:
        """Test sets of a run and settings of its task, as options of `evaluate-finetuned`."""
        settings = self._settings(wildcards)
        sets = settings.test_files or {"validation": settings.validation_files}
        data = [f"--data={name}={path}" for name, paths in sets.items() for path in paths]
        return [*data, f"--settings={json.dumps(settings.task.own, sort_keys=True)}"]
