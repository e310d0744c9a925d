"""Inputs and options of the rules that make data: from raw files to weighting files of runs."""

import json
import sys
from collections.abc import Callable, Container, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from tokamake import files
from tokamake.config.filters import reads_metadata, source_digest
from tokamake.config.objective import companion_key
from tokamake.data.corpus.fetch_batch import ALL
from tokamake.data.corpus.plan_file import shard_prefixes
from tokamake.data.indexed.job_batch import find_batch_fault, has_deleted_inputs
from tokamake.data.indexed.paths import corpus_of
from tokamake.preflight.planned import WorkflowConfig
from tokamake.workflow.exit import exit_on_user_error
from tokamake.workflow.options import options
from tokamake.workflow.snakemake_internals import ancient


class DataRules:
    """Input functions and options of the data rules. Wildcards are `batch`, `corpus` and `run`."""

    def __init__(self, config: WorkflowConfig, force_job: Callable[[str], None] | None) -> None:
        """Look up which job batch makes which shard.

        Args:
            force_job: makes Snakemake run the job that writes a file; None in a job, where
                nothing is planned.
        """
        self._config = config
        self._data_set = config.data_set
        self._force_job = force_job
        batches, merges = config.tokenize_batches, config.merge_batches
        self._deleted: dict[str, bool] = {}
        self._tokenize_batch = {shard: name for name in batches for shard in batches[name]}
        self._corpus_batches: dict[str, list[str]] = {}
        for name in batches:
            self._corpus_batches.setdefault(corpus_of(name), []).append(name)
        # A shard with several text keys is part of several merged datasets.
        self._merge_batches: dict[str, set[str]] = {}
        for name in merges:
            for merged in merges[name]:
                for shard in config.merged[merged].shards:
                    self._merge_batches.setdefault(shard, set()).add(name)

    def plan_file(self, wildcards: Any) -> list[str]:  # noqa: ARG002
        """The plan as an input; a dry run in a new folder has none yet.

        It is ancient: digests in `params` decide which jobs a new plan runs again.
        """
        path = self._data_set.plan
        return ancient([path]) if Path(path).exists() else []

    def raw_outputs(self, paths: Iterable[str]) -> list[str]:
        """Raw files that a job of the workflow makes.

        Other raw files are not declared as inputs: 100,000 would slow Snakemake; digests in
        `params` stand for their sizes and times.
        """
        made = self._config.raw_outputs
        return sorted(made.keys() & set(paths)) if made else []

    def tokenizer_corpus(self) -> list[str]:
        """Raw files that the tokenizer is trained on and that a job makes."""
        return self.raw_outputs(self._tokenizer_files())

    def tokenizer_downloads(self) -> list[str]:
        """The list of downloads that the tokenizer is trained on, if it has any."""
        has_any = not self._config.downloads.keys().isdisjoint(self._tokenizer_files())
        return [self._data_set.batch_file("fetch/train_tokenizer", ALL)] if has_any else []

    def _tokenizer_files(self) -> set[str]:
        return {path for source in self._config.plan.tokenizer for path in source.files}

    def raw_files(self, wildcards: Any) -> list[str]:
        """Raw files of all shards of a job batch that a job makes."""
        shards = self._config.tokenize_batches[wildcards.batch]
        return self.raw_outputs(
            path for shard in shards for path in self._config.shards[shard].files
        )

    def downloads_for(self, stage: str) -> Callable[[Any], list[str]]:
        """Input function: the list of downloads of a job batch, for a stage that reads raw files.

        Each job has a list of its own. It is temporary, and other jobs that read the same files do
        not run again because of it.
        """

        def downloads(wildcards: Any) -> list[str]:
            has_any = bool(self._downloads(wildcards.batch))
            return [self._data_set.batch_file(f"fetch/{stage}", wildcards.batch)] if has_any else []

        return downloads

    def downloads_digest(self, wildcards: Any) -> str:
        """Digest of the downloads of a job batch, or for the tokenizer."""
        return files.digest(self._downloads(wildcards.batch))

    def _downloads(self, batch: str) -> list[str]:
        """Paths of the raw files of a job batch, or for the tokenizer, that are downloaded."""
        if not (downloads := self._config.downloads):
            return []
        if batch == ALL:
            return sorted(downloads.keys() & self._tokenizer_files())
        shards = (self._config.shards[name] for name in self._config.tokenize_batches[batch])
        return sorted({path for shard in shards for path in shard.files if path in downloads})

    def tokenize_inputs(self, wildcards: Any) -> list[str]:
        """Raw files of a job batch, once it is known whether its shards are still complete."""
        shards = self._config.tokenize_batches[wildcards.batch]
        merges = sorted({name for shard in shards for name in self._merge_batches[shard]})
        product = self._data_set.batch_file("merge", merges[0])
        deleted = {
            str(prefix)
            for name in merges
            if self._has_deleted_shards(name)
            for merged in self._config.merge_batches[name]
            for prefix in shard_prefixes(self._config.merged[merged], Path())
        }
        batch = Path(self._data_set.batch_file("tokenize", wildcards.batch))
        if not deleted or batch.exists():
            self._redo_if_broken("tokenize", wildcards.batch, product=product, deleted=deleted)
        return self.raw_files(wildcards)

    def _has_deleted_shards(self, batch: str) -> bool:
        """Whether the shards of the merged datasets of a job batch were deleted on purpose."""
        if batch not in self._deleted:
            file = Path(self._data_set.batch_file("merge", batch))
            self._deleted[batch] = file.exists() and has_deleted_inputs(file)
        return self._deleted[batch]

    def merge_inputs(self, wildcards: Any) -> list[str]:
        """Batch files of the shards that the merged datasets of a job batch are made from."""
        merged = [self._config.merged[name] for name in self._config.merge_batches[wildcards.batch]]
        batches = sorted(
            {self._tokenize_batch[shard] for merge in merged for shard in merge.shards}
        )
        self._redo_if_broken("merge", wildcards.batch, product=self._data_set.metadata)
        file = self._data_set.batch_file("merge", wildcards.batch)
        deletes = Path(file).exists() and batches and not self._config.shared.plan.keep_shards
        # A finished job that has kept its shards runs again, and deletes them.
        if self._force_job and deletes and not self._has_deleted_shards(wildcards.batch):
            self._force_job(file)
        return [self._data_set.batch_file("tokenize", batch) for batch in batches]

    def merge_files(self) -> list[str]:
        """Batch files of all merged datasets."""
        return [self._data_set.batch_file("merge", batch) for batch in self._config.merge_batches]

    def corpus_hashes(self, wildcards: Any) -> list[str]:
        """Hashes of the documents of a corpus, or of all compared corpora, in their order."""
        is_whole = self._config.shared.tokenize.deduplicate == "data"
        batches = self._batches_of(None if is_whole else wildcards.scope)
        return [f"{self._data_set.folder}/hashes/{batch}.rows" for batch in batches]

    def signed_documents(self, wildcards: Any) -> list[str]:
        """Band keys of the documents of a corpus, or of all compared corpora in their order."""
        folder = f"{self._data_set.folder}/near_duplicates/signed"
        near = self._config.shared.tokenize.near_duplicates
        is_whole = near is not None and near.scope == "data"
        batches = self._batches_of(None if is_whole else wildcards.scope)
        return [f"{folder}/{batch}.rows" for batch in batches]

    def _batches_of(self, corpus: str | None) -> list[str]:
        """Names of the `tokenize` batches of a corpus; None: of all corpora that are compared."""
        if corpus is not None:
            return self._corpus_batches.get(corpus, [])
        return [batch for name in self._compared for batch in self._corpus_batches[name]]

    @cached_property
    def _compared(self) -> list[str]:
        """Corpora whose documents are compared with others, to drop copies."""
        corpora = self._config.corpora
        return [name for name in self._corpus_batches if not corpora[name].keep_copies]

    def equal_documents(self, wildcards: Any) -> list[str]:
        """File of documents of a corpus that equal earlier ones, if the config asks for it."""
        corpus, deduplicate = corpus_of(wildcards.batch), self._config.shared.tokenize.deduplicate
        if not deduplicate or corpus not in self._compared:
            return []
        scope = ALL if deduplicate == "data" else corpus
        return [f"{self._data_set.folder}/duplicates/{scope}.rows"]

    def corpus_duplicates(self, wildcards: Any) -> list[str]:
        """Files of documents of a corpus to leave out, if the config asks for deduplication."""
        corpus, tokenize = corpus_of(wildcards.batch), self._config.shared.tokenize
        paths = self.equal_documents(wildcards)
        if (near := tokenize.near_duplicates) and corpus in self._compared:
            scope = ALL if near.scope == "data" else corpus
            paths.append(f"{self._data_set.folder}/near_duplicates/{scope}.rows")
        return paths

    def hashed_passages(self, wildcards: Any) -> list[str]:
        """Passages of the documents of a corpus, or of all compared corpora in their order."""
        folder = f"{self._data_set.folder}/repeats/hashed"
        repeats = self._config.shared.tokenize.repeats
        is_whole = repeats is not None and repeats.scope == "data"
        batches = self._batches_of(None if is_whole else wildcards.scope)
        return [f"{folder}/{batch}.rows" for batch in batches]

    def corpus_repeats(self, wildcards: Any) -> list[str]:
        """File of text to cut out of a corpus, if the config asks for it."""
        corpus, repeats = corpus_of(wildcards.batch), self._config.shared.tokenize.repeats
        if not repeats or corpus not in self._compared:
            return []
        scope = ALL if repeats.scope == "data" else corpus
        return [f"{self._data_set.folder}/repeats/{scope}.rows"]

    def corpus_options(self, wildcards: Any) -> list[str]:
        """How the documents of a `tokenize` batch are read."""
        corpus = self._config.corpora[corpus_of(wildcards.batch)]
        keys = [f"--text-key={key}" for key in corpus.text_key.split(",")]
        return [*keys, f"--template={corpus.template}", f"--format={corpus.format}"]

    def tokenize_options(self, wildcards: Any) -> list[str]:
        """How the documents of a `tokenize` batch are read and filtered."""
        return self._filter_options(wildcards, self._filters(wildcards.batch))

    def hash_options(self, wildcards: Any) -> list[str]:
        """How the documents of a `tokenize` batch are read, and filtered if copies may differ."""
        return self._filter_options(wildcards, self._filters_of_copies(wildcards.batch))

    def _filter_options(self, wildcards: Any, filters: tuple[dict[str, Any], ...]) -> list[str]:
        if not filters:
            return self.corpus_options(wildcards)
        seconds = self._config.shared.tokenize.filter_seconds
        filtering = [f"--filters={json.dumps(filters)}", f"--filter-seconds={seconds:g}"]
        return [*self.corpus_options(wildcards), *filtering]

    def _filters(self, batch: str) -> tuple[dict[str, Any], ...]:
        return self._config.filters(corpus_of(batch))

    def _filters_of_copies(self, batch: str) -> tuple[dict[str, Any], ...]:
        """Filters of a batch if they may keep one of two equal texts and drop the other.

        Then documents that they drop must be no duplicates: else `deduplicate` might keep a copy
        that its filters drop later, and no copy would be left.
        """
        filters = self._filters(batch)
        return filters if self._corpora_differ or reads_metadata(filters) else ()

    @cached_property
    def _corpora_differ(self) -> bool:
        """Whether corpora that `deduplicate` compares with each other have different filters."""
        if self._config.shared.tokenize.deduplicate != "data":
            return False
        filters = [*map(self._config.filters, self._compared)]
        return any(each != filters[0] for each in filters)

    def shards_digest(self, wildcards: Any) -> str:
        """Digest of the shards of a job batch, and of their raw files' sizes and times."""
        names = self._config.tokenize_batches[wildcards.batch]
        shards = [self._config.shards[name] for name in names]
        return files.digest(str([(s.name, s.files, s.byte_range, s.stamp) for s in shards]))

    @exit_on_user_error()
    def filtered_shards_digest(self, wildcards: Any) -> str:
        """The same, and hashes of external filters' source files and of files that filters read."""
        return self._with_sources(wildcards, self._filters(wildcards.batch))

    @exit_on_user_error()
    def hashed_shards_digest(self, wildcards: Any) -> str:
        """The same for the filters of `hash_options`."""
        return self._with_sources(wildcards, self._filters_of_copies(wildcards.batch))

    def _with_sources(self, wildcards: Any, filters: tuple[dict[str, Any], ...]) -> str:
        named = [each for entry in filters for each in entry.items()]
        sources = list(filter(None, (source_digest(*each) for each in named)))
        shards = self.shards_digest(wildcards)
        return files.digest([shards, *sources]) if sources else shards

    def merges_digest(self, wildcards: Any) -> str:
        """Digest of the inputs of a job batch's merged datasets."""
        names = self._config.merge_batches[wildcards.batch]
        merged = [self._config.merged[name] for name in names]
        return files.digest([merge if merge.dataset else merge[:4] for merge in merged])

    def links_tokenizer(self, wildcards: Any) -> list[str]:
        """Tokenizer of the datasets that a job batch links to; empty if it merges shards."""
        names = self._config.merge_batches[wildcards.batch]
        links = any(self._config.merged[name].dataset for name in names)
        return self._config.tokenizer_files if links else []

    def links_options(self, wildcards: Any) -> list[str]:
        """How documents of existing indexed datasets end."""
        links = bool(self.links_tokenizer(wildcards))
        return options(self._config.shared.tokenize, only=("append_eod",)) if links else []

    def datasets_digest(self) -> str:
        """Digest of the names of all merged datasets."""
        return files.digest(list(self._config.merged))

    def table_options(self, wildcards: Any) -> list[str]:
        """The run's corpora, and corpora of other runs, which it does not draw from."""
        run = self._config.runs[wildcards.run]
        files = {"corpora": run.corpus_table, "weights": run.weights, "data-root": run.data_root}
        own = {corpus.corpus for corpus in self._config.tables[wildcards.run]}
        unused = sorted(self._config.corpora.keys() - own)
        return [
            *(f"--{name}={path}" for name, path in files.items() if path),
            *([f"--plan={self._data_set.plan}"] if run.weights else []),
            *(f"--leave-out={corpus}" for corpus in unused),
            *([f"--titles={key}"] if (key := companion_key(run.train)) else []),
        ]

    def weights_plan(self, wildcards: Any) -> list[str]:
        """The plan, if a weighting file names datasets by their corpora."""
        return self.plan_file(wildcards) if self._config.runs[wildcards.run].weights else []

    def table_files(self, wildcards: Any) -> list[Path]:
        """The run's table of corpora and its weighting file."""
        run = self._config.runs[wildcards.run]
        return [path for path in (run.corpus_table, run.weights) if path]

    def _redo_if_broken(
        self, stage: str, name: str, *, product: str, deleted: Container[str] = ()
    ) -> None:
        """Redo a finished job batch if one of its datasets was damaged or deleted since.

        Snakemake looks only at the times of batch files, and ignores a missing one if its product
        exists. The job rewrites only broken datasets.

        Args:
            stage: `tokenize` or `merge`.
        """
        batch = self._data_set.batch_file(stage, name)
        folder = f"{self._data_set.folder}/{'shards' if stage == 'tokenize' else 'merged'}"
        if self._force_job is None or not (Path(batch).exists() or Path(product).exists()):
            return
        if fault := find_batch_fault(Path(batch), folder, deleted=deleted):
            if Path(batch).exists():  # new raw files may explain a missing one
                print(f"tokamake: {fault}: rebuilding it", file=sys.stderr)
            self._force_job(batch)
