"""Facts of the dry run: the checked config of all runs, and the plan of their data."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokamake.config.data_set import DataSet
from tokamake.config.filters import complete_filters
from tokamake.config.root import Config
from tokamake.config.runs import NamedRun
from tokamake.data.corpus.corpora import Corpus
from tokamake.data.corpus.plan_file import Plan, PlannedDownload, PlannedMerge, PlannedShard
from tokamake.data.corpus.prompts import read_prompts
from tokamake.preflight.initial_models import find_tokenizer

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
"""Files of a tokenizer that the workflow writes."""


@dataclass(frozen=True)
class WorkflowConfig:
    """The checked config of all runs, and facts that follow from it before any job runs."""

    named_runs: dict[str, NamedRun]
    """Each run, by name."""
    tables: dict[str, list[Corpus]]
    """Corpora of each run."""
    corpora: dict[str, Corpus]
    """Corpora of all runs, by name."""
    raw_outputs: dict[str, int]
    """Raw files that jobs write, with their sizes in bytes."""
    plan: Plan
    """Shards, merged datasets and job batches."""
    previous_plan: Plan | None
    """The plan on disk when the config was read."""

    @cached_property
    def runs(self) -> dict[str, Config]:
        """Config of each run that pretrains, by name."""
        return {n: run for n, (run, _) in self.named_runs.items() if run.finetune is None}

    @cached_property
    def finetuned(self) -> dict[str, Config]:
        """Config of each run that finetunes, by name."""
        return {n: run for n, (run, _) in self.named_runs.items() if run.finetune}

    @property
    def all_runs(self) -> dict[str, Config]:
        """Config of each run, by name."""
        return {**self.runs, **self.finetuned}

    @property
    def shared(self) -> Config:
        """The config of any run, for sections that all runs share."""
        return next(iter(self.all_runs.values()))

    @property
    def data_set(self) -> DataSet:
        """The data that all runs share."""
        return DataSet(self.shared.data_set)

    @property
    def sample_files(self) -> dict[str, int]:
        """Raw files that `sample_corpus` makes, with their sizes in bytes."""
        kept = self.data_set.kept_texts
        return {path: size for path, size in self.raw_outputs.items() if path != kept}

    @cached_property
    def given_tokenizer(self) -> list[Path] | None:
        """Files of the tokenizer; None: the workflow trains one."""
        return find_tokenizer(self.named_runs)

    @cached_property
    def changed_shards(self) -> frozenset[str]:
        """Shards whose raw files have changed since the workflow last ran."""
        return changed_shards(self.plan, self.previous_plan)

    @cached_property
    def num_prompts(self) -> int:
        """Prompts of the section `detoxify`."""
        assert self.shared.detoxify is not None, "the config has the section"
        prompts = self.shared.detoxify.prompts
        return len(read_prompts(prompts.path, key=prompts.key, toxicity_key=prompts.toxicity_key))

    def filters(self, corpus: str) -> tuple[dict[str, Any], ...]:
        """Filters of a corpus: its own, or `tokenize.filters`; they see the tasks of all runs."""
        own = self.corpora[corpus].filters
        tasks = {
            key: task for run in self.all_runs.values() for key, task in run.evaluate.tasks.items()
        }
        return complete_filters(self.shared.tokenize.filters if own is None else own, tasks)

    @cached_property
    def splits(self) -> list[str]:
        """Splits other than `train` that corpora name."""
        named = (split for corpus in self.corpora.values() for split in corpus.parts)
        return list(dict.fromkeys(split for split in named if split != "train"))

    @cached_property
    def tokenizer_files(self) -> list[str]:
        """Files of the data's tokenizer; the file that `tokenizer.path` may name is first."""
        if self.given_tokenizer:
            return [str(path) for path in self.given_tokenizer]
        return [f"{self.data_set.tokenizer}/{name}" for name in _TOKENIZER_FILES]

    @cached_property
    def run_tokenizer_files(self) -> list[str]:
        """Files of the runs' tokenizer, which may have sentinels; the file to name is first."""
        if not self.shared.tokenizer.sentinels:
            return self.tokenizer_files
        return [f"{self.data_set.extended_tokenizer}/{name}" for name in _TOKENIZER_FILES]

    @property
    def tokenizer_stamp(self) -> str:
        """Hash of the files that the tokenizer is trained on; for corpora of token ids, the eod."""
        tokenizer = self.shared.tokenizer
        return f"eod {tokenizer.eod}" if tokenizer.has_ids else self.plan.tokenizer_stamp

    @cached_property
    def shards(self) -> dict[str, PlannedShard]:
        """Shards by name."""
        return {shard.name: shard for shard in self.plan.shards}

    @cached_property
    def downloads(self) -> dict[str, PlannedDownload]:
        """Raw files behind addresses, by path."""
        return {download.path: download for download in self.plan.downloads}

    @cached_property
    def merged(self) -> dict[str, PlannedMerge]:
        """Merged datasets by name."""
        return {merge.name: merge for merge in self.plan.merged}

    @cached_property
    def tokenize_batches(self) -> dict[str, tuple[str, ...]]:
        """Names of the shards of each job batch."""
        return {batch.name: batch.members for batch in self.plan.tokenize_batches}

    @cached_property
    def merge_batches(self) -> dict[str, tuple[str, ...]]:
        """Names of the merged datasets of each job batch."""
        return {batch.name: batch.members for batch in self.plan.merge_batches}

    @property
    def batch_names(self) -> list[str]:
        """Names of the job batches of both stages, each once."""
        return list(dict.fromkeys([*self.tokenize_batches, *self.merge_batches]))


def changed_shards(plan: Plan, previous: Plan | None) -> frozenset[str]:
    """Shards of both plans whose raw files have changed since the earlier one."""
    if previous is None or previous.shards == plan.shards:
        return frozenset()
    earlier = {shard.name: shard for shard in previous.shards}
    return frozenset(
        [
            shard.name
            for shard in plan.shards
            if (old := earlier.get(shard.name))
            and (old.files, old.byte_range, old.stamp)
            != (shard.files, shard.byte_range, shard.stamp)
        ]
    )
