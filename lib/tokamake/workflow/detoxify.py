"""Texts for detoxification, as functions for rules.

Wildcards: `texts`, the folder of texts of one kind; `shard`, a part of them; `run`.
"""

import json
import sys
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tokamake.config.data_set import RUN
from tokamake.config.detoxify import DetoxifySettings
from tokamake.config.scorers import open_scorer, source_digests
from tokamake.detoxify.scorers import TextScorer
from tokamake.preflight.planned import WorkflowConfig
from tokamake.workflow.checkpoints import CheckpointRules
from tokamake.workflow.exit import exit_on_user_error
from tokamake.workflow.options import RunSettings, options

RULES = (
    *("generate_texts", "score_texts", "select_texts", "measure_toxicity"),
    "detoxify",
)
"""Rules of a config with the section `detoxify`."""

_MAX_SHARDS = 500
"""Jobs for the texts of a folder; their paths must fit into a command, which has 128 KB."""


class DetoxifyRules:
    """Texts of the model before training, and continuations before and after it."""

    def __init__(
        self,
        config: WorkflowConfig,
        checkpoints: CheckpointRules,
        *,
        force_job: Callable[[str], None] | None = None,
    ) -> None:
        """Name the folders of texts.

        Args:
            force_job: makes Snakemake run the job that writes a file; None in a job.
        """
        self._config, self._checkpoints, self._force_job = config, checkpoints, force_job
        self.samples = f"{config.data_set.detoxify}/samples"
        """Folder of the texts without a prompt."""
        self.before = f"{config.data_set.detoxify}/before"
        """Folder of the continuations before training."""
        self._runs = {self.after(run): run for run in config.runs}

    @property
    def folders(self) -> list[str]:
        """Folders of all texts; the wildcard `texts` is one of them."""
        return [self.samples, self.before, *self._runs]

    @staticmethod
    def after(run: str) -> str:
        """Folder of the continuations after training."""
        return f"{RUN.format(run=run)}/detoxify"

    @property
    def _settings(self) -> DetoxifySettings:
        settings = self._config.shared.detoxify
        assert settings is not None, "rules ask for it in this case only"
        return settings

    # ---- Shards ----

    def _num_texts(self, texts: str) -> int:
        settings = self._settings
        is_sample = texts == self.samples
        return (
            settings.num_texts if is_sample else self._config.num_prompts * settings.continuations
        )

    def scored(self, texts: str) -> list[str]:
        """Files of scored texts in a folder."""
        num_shards = -(-self._num_texts(texts) // self._texts_per_job(texts))
        return [f"{texts}/scored-{shard:05d}.jsonl" for shard in range(num_shards)]

    def _texts_per_job(self, texts: str) -> int:
        """Texts of a shard: more than the setting if there would be more than `_MAX_SHARDS`."""
        return max(self._settings.texts_per_job, -(-self._num_texts(texts) // _MAX_SHARDS))

    def scored_before(self, wildcards: Any) -> list[str]:  # noqa: ARG002
        """Files of scored continuations before training."""
        return self.scored(self.before)

    def scored_after(self, wildcards: Any) -> list[str]:
        """Files of scored continuations after training."""
        return self.scored(self.after(wildcards.run))

    def outputs_before_training(self, outputs: list[str]) -> list[str]:
        """Files that a rule with the wildcards `texts` and `shard` makes of the initial model.

        Another program can score these texts; texts of the trained model need their scores.
        """
        shards = {texts: range(len(self.scored(texts))) for texts in (self.samples, self.before)}
        return [
            output.format(texts=texts, shard=f"{shard:05d}")
            for output in outputs
            for texts, numbers in shards.items()
            for shard in numbers
        ]

    # ---- Inputs and options ----

    def model(self, wildcards: Any) -> str:
        """Folder of the model that writes texts."""
        if run := self._runs.get(wildcards.texts):
            return f"{RUN.format(run=run)}/export"
        return self._checkpoints.initial_folder(self._first)

    def model_inputs(self, wildcards: Any) -> list[str] | str:
        """Files that exist once the model does."""
        is_after = wildcards.texts in self._runs
        return self.model(wildcards) if is_after else self._checkpoints.start_inputs(self._first)

    @property
    def _first(self) -> Any:
        """Wildcards of a run that starts from the model to detoxify."""
        return next(
            SimpleNamespace(run=name)
            for name, run in self._config.runs.items()
            if not run.model.parent
        )

    def prompts(self, wildcards: Any) -> list[str]:
        """The file of prompts; empty for texts without a prompt."""
        return [] if wildcards.texts == self.samples else [str(self._settings.prompts.path)]

    def generation_options(self, wildcards: Any) -> list[str]:
        """Texts of a shard, and how the model writes them, as options of `generate-texts`."""
        settings, prompts = self._settings, self._settings.prompts
        most = self._texts_per_job(wildcards.texts)
        first = int(wildcards.shard) * most
        number = min(most, self._num_texts(wildcards.texts) - first)
        sampling = options(settings, only=("temperature", "top_p", "seed", "dtype"))
        shared = [f"--num-texts={number}", f"--first={first}", "--top-k=0", *sampling]
        if wildcards.texts == self.samples:
            return [*shared, f"--max-new-tokens={settings.max_new_tokens}"]
        keys = {"prompt-key": prompts.key, "toxicity-key": prompts.toxicity_key}
        return [
            *shared,
            f"--max-new-tokens={settings.continuation_tokens}",
            f"--continuations={settings.continuations}",
            *(f"--{name}={key}" for name, key in keys.items()),
        ]

    def layout(self, run_settings: RunSettings) -> Callable[..., list[str]]:
        """Function of a job: how its ranks share the model, which changes no text."""

        def layout(wildcards: Any, output: Any, *, resources: Any) -> list[str]:
            run = self._runs.get(wildcards.texts, self._first.run)
            batch_size = f"--batch-size={self._settings.batch_size}"
            return [*run_settings.layout(run, resources), batch_size]

        return layout

    @exit_on_user_error()
    def texts_to_score(self, wildcards: Any) -> list[str]:
        """Texts of a shard. They are scored again if the scorer has other scores for them now."""
        shard = f"{wildcards.texts}/{{}}-{wildcards.shard}.jsonl"
        scored, texts = Path(shard.format("scored")), shard.format("generated")
        both_exist = scored.is_file() and Path(texts).is_file()
        if self._force_job and both_exist and self._scorer.has_changed(scored):
            print(f"tokamake: {scored}: other scores now: scoring it again", file=sys.stderr)
            self._force_job(str(scored))
        return [texts]

    @cached_property
    def _scorer(self) -> Any:
        scorer = open_scorer(self._settings.scorer)
        return scorer if isinstance(scorer, TextScorer) else TextScorer()

    def scorer(self, wildcards: Any) -> str:  # noqa: ARG002
        """The scorer as JSON. A function, since Snakemake would format the braces of a text."""
        return json.dumps(self._settings.scorer, sort_keys=True)

    @exit_on_user_error()
    def scorer_digests(self, wildcards: Any) -> list[str]:  # noqa: ARG002
        """Hashes of the files that decide scores: texts are scored again if one changes."""
        return source_digests(self._settings.scorer)
