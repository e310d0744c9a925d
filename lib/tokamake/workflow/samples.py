"""Inputs and options of the rules that divide the data of a run into samples and splits."""

import json
from typing import Any

from tokamake.config.objective import SECTIONS, objective_section, sample_settings
from tokamake.preflight.data import held_out_splits
from tokamake.preflight.planned import WorkflowConfig
from tokamake.workflow.paths import split_weights


class SampleRules:
    """Input functions and options of `weigh`, `index` and `evaluate`. The wildcard is `run`."""

    def __init__(self, config: WorkflowConfig) -> None:
        self._config = config

    def length_options(self, wildcards: Any) -> list[str]:
        """Length of the training, where epochs of corpora make `weigh` depend on it."""
        run = self._config.runs[wildcards.run]
        train = run.train
        if all(corpus.epochs is None for corpus in self._config.tables[wildcards.run]):
            return []
        if train.num_samples is None:
            return [f"--split={train.split}"]
        tokens = train.num_samples * train.sequence_length
        return [f"--split={train.split}", f"--train-tokens={tokens}"]

    def sample_options(self, wildcards: Any) -> list[str]:
        """How many samples `index` makes, and by which objective."""
        run = self._config.runs[wildcards.run]
        train = run.train
        valid = f"--valid-samples={train.evaluation_steps * train.global_batch_size}"
        further = [valid, *self.objective_options(wildcards)]
        if train.num_samples is not None:
            return [f"--train-samples={train.num_samples}", *further]
        trained = [corpus for corpus in self._config.tables[wildcards.run] if corpus.trains]
        return [*(f"--epochs={corpus.corpus}={corpus.epochs!r}" for corpus in trained), *further]

    def objective_options(self, wildcards: Any) -> list[str]:
        """Objective, its settings and tokenizer; none if the objective needs no index of its own.

        Options of earlier versions stay unchanged: else Snakemake would run `index` again.
        """
        train = self._config.runs[wildcards.run].train
        if not sample_settings(train):
            return []
        settings, option = train.masking.model_dump(mode="json"), "masking"
        if train.objective in SECTIONS:
            section = objective_section(train).model_dump(mode="json")
            settings = {key: section[key] for key in section if key in sample_settings(train)}
            option = "objective-settings"
        stated = json.dumps(settings, sort_keys=True)
        return [
            f"--objective={train.objective}",
            f"--{option}={stated}",
            f"--tokenizer={self._config.run_tokenizer_files[0]}",
        ]

    def objective_tokenizer(self, wildcards: Any) -> list[str]:
        """Files of the tokenizer, if `index` needs it."""
        has_own_index = bool(sample_settings(self._config.runs[wildcards.run].train))
        return self._config.run_tokenizer_files if has_own_index else []

    def held_out_options(self, wildcards: Any, input: Any) -> list[str]:  # noqa: ARG002
        """Weighting files of the splits other than the training split."""
        named = zip(self._config.splits, input.held_out, strict=True)
        return [f"--held-out={split}={path}" for split, path in named]

    def evaluation_weights(self, wildcards: Any) -> list[str]:
        """Weighting files of the splits that a run may be evaluated on."""
        names = self._evaluation_splits(wildcards.run)
        weights = self._config.data_set.weights.format(run=wildcards.run)
        return [split_weights(weights, name) for name in names]

    def evaluation_options(self, wildcards: Any, input: Any) -> list[str]:
        """Weighting files of held-out splits, as options of `evaluate`."""
        named = zip(self._evaluation_splits(wildcards.run), input.held_out, strict=True)
        return [f"--held-out={split}={path}" for split, path in named]

    def _evaluation_splits(self, run: str) -> list[str]:
        """Splits with a weighting file: the test split, or if a run has none, validation splits."""
        splits = held_out_splits(self._config.runs[run].train, self._config.tables[run])
        tests = "test" in splits
        return [name for name in self._config.splits if (name == "test") == tests]
