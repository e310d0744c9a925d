"""Data of a workflow before it is built: documents and tokens of each corpus, disk by stage."""

import os
from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tokamake import files
from tokamake.data.corpus.corpora import Corpus
from tokamake.data.corpus.documents import Fields, split_keys
from tokamake.data.corpus.plan_file import PlannedShard
from tokamake.data.indexed.dataset import DTYPES, token_dtype
from tokamake.data.indexed.index_reader import read_layout
from tokamake.data.indexed.paths import bin_path, idx_path
from tokamake.data.readers import DECLARED
from tokamake.data.tokenizers import open_tokenizer
from tokamake.errors import UserError
from tokamake.estimate.tokens import Count, Tokenize, count_tokens
from tokamake.preflight.planned import WorkflowConfig

_SEQUENCE_BYTES, _DOCUMENT_BYTES = 12, 8
"""Bytes of an index for each sequence (length, first byte) and each document."""


class CorpusEstimate(NamedTuple):
    """A corpus, from its raw files or from its datasets."""

    corpus: str
    files: int
    """Raw files, or existing datasets."""
    raw_bytes: int
    documents: float
    """0: not known."""
    tokens: float
    error: float | None
    """Tokens by which the estimate may be wrong, at 95 % confidence; None: not known."""
    source: str
    """How it is known: built, datasets, counted, sampled or assumed."""


class DataEstimate(NamedTuple):
    """The data that all runs share."""

    corpora: list[CorpusEstimate]
    shards: int
    tokenize_jobs: int
    merged: int
    merge_jobs: int
    shards_bytes: float
    merged_bytes: float

    @property
    def tokens(self) -> dict[str, float]:
        """Tokens of each corpus, at least one."""
        return {each.corpus: max(1.0, each.tokens) for each in self.corpora}


def estimate_data(config: WorkflowConfig, *, sample_bytes: int, seed: int) -> DataEstimate:
    """Estimate the data of a workflow; datasets that are built are read.

    Args:
        sample_bytes: bytes of each corpus to tokenize; 0: none, tokens follow from file sizes and
            plan.token_bytes_per_text_byte.
    """
    counts = _Counts(config, sample_bytes=sample_bytes, seed=seed)
    corpora = [counts.of_corpus(row) for row in config.corpora.values()]
    linked = {corpus.corpus for corpus in corpora if corpus.source == "datasets"}
    new = [corpus for corpus in corpora if corpus.corpus not in linked]
    size = sum(
        corpus.tokens * counts.token_bytes + corpus.documents * (_SEQUENCE_BYTES + _DOCUMENT_BYTES)
        for corpus in new
    )
    plan = config.plan
    return DataEstimate(
        corpora,
        shards=len(plan.shards),
        tokenize_jobs=len(plan.tokenize_batches),
        merged=len(plan.merged),
        merge_jobs=len(plan.merge_batches),
        shards_bytes=size if plan.keep_shards else 0.0,
        merged_bytes=size,
    )


class _Counts:
    """Counts documents and tokens of corpora."""

    def __init__(self, config: WorkflowConfig, *, sample_bytes: int, seed: int) -> None:
        self._config, self._sample_bytes, self._seed = config, sample_bytes, seed
        self._built = _built(config)
        self._datasets: dict[str, list[str]] = defaultdict(list)
        self._shards: dict[str, list[PlannedShard]] = defaultdict(list)
        for merge in config.plan.merged:
            if merge.dataset:
                self._datasets[merge.corpus].append(merge.dataset)
        for shard in config.plan.shards:
            self._shards[shard.corpus].append(shard)
        self._tokenizer: Tokenize | None = None
        settings = config.shared.tokenizer
        self.vocab_size = settings.vocab_size
        path = _tokenizer(config)
        self._added = config.shared.tokenize.append_eod + config.shared.tokenize.prepend_bos
        if settings.has_ids:
            self._tokenizer = _count_ids if sample_bytes else None
            self._added = self._added if settings.eod is not None else 0
        elif path:
            self.vocab_size = open_tokenizer(path).vocab_size
            if sample_bytes:
                self._tokenizer = _encoder(path, config.shared.tokenize.special_tokens_in_text)
        self.token_bytes = np.dtype(token_dtype(self.vocab_size)).itemsize

    def of_corpus(self, row: Corpus) -> CorpusEstimate:
        """Count or estimate a corpus."""
        name = row.corpus
        datasets = self._datasets[name]
        if datasets:
            found = [_of_dataset(Path(dataset)) for dataset in datasets]
            size = sum(bin_path(Path(dataset)).stat().st_size for dataset in datasets)
            documents, tokens = (sum(each[i] for each in found) for i in (0, 1))
            return CorpusEstimate(name, len(datasets), size, documents, tokens, 0.0, "datasets")
        shards = self._shards[name]
        stamps = {p: s for shard in shards for p, s in zip(shard.files, shard.stamps, strict=False)}
        size = sum(_size(path, each) for path, each in stamps.items())
        describe = partial(CorpusEstimate, name, len(stamps))
        if name in self._built:
            documents, tokens = self._built[name]
            return describe(size, documents, tokens, 0.0, "built")
        if self._tokenizer and all(map(os.path.isfile, stamps)):
            count = self._sample(row, [*map(Path, stamps)])
            if count.documents or count.is_all:
                source = "counted" if count.is_all else "sampled"
                return describe(size, count.documents, count.tokens, count.error, source)
        planned = sum(shard.bytes for shard in shards)
        return describe(size, 0.0, planned / self.token_bytes, None, "assumed")

    def _sample(self, row: Corpus, paths: list[Path]) -> Count:
        assert self._tokenizer is not None
        return count_tokens(
            paths,
            self._tokenizer,
            fields=Fields(split_keys([row.text_key]), row.template),
            format=row.format,
            tokens_per_document=self._added,
            sample_bytes=self._sample_bytes,
            seed=self._seed,
        )


def _size(path: str, stamp: str) -> int:
    """Bytes of a raw file; 0: it does not exist yet."""
    if stamp != DECLARED:
        return int(stamp.partition(":")[0])
    return Path(path).stat().st_size if Path(path).is_file() else 0


def _built(config: WorkflowConfig) -> dict[str, tuple[int, int]]:
    """Documents and tokens of corpora whose datasets are complete, from the metadata."""
    path = Path(config.data_set.metadata)
    if config.plan != config.previous_plan or not path.is_file():
        return {}
    totals: dict[str, tuple[int, int]] = {}
    try:
        entries: Iterable[dict[str, Any]] = files.read_json(path, "run the workflow again")
        for entry in entries:
            before = totals.get(entry["corpus"], (0, 0))
            own = entry["total_num_docs"], entry["total_num_tokens"]
            totals[entry["corpus"]] = (before[0] + own[0], before[1] + own[1])
    except (UserError, KeyError, TypeError):  # the stage that reads it reports it
        return {}
    return totals


def _of_dataset(prefix: Path) -> tuple[int, int]:
    """Documents and tokens of an existing dataset, from its header and its size."""
    layout = read_layout(idx_path(prefix))
    size = np.dtype(DTYPES.get(layout.code, np.int32)).itemsize
    return layout.bounds.length - 1, bin_path(prefix).stat().st_size // size


def _tokenizer(config: WorkflowConfig) -> Path | None:
    """The tokenizer of the data, if it exists already."""
    paths = map(Path, config.tokenizer_files)
    return next((path for path in paths if path.is_file()), None)


def _count_ids(texts: Iterable[str]) -> list[int]:
    return [len(text.split()) for text in texts]


def _encoder(path: Path, special_tokens_in_text: str) -> Tokenize:
    from tokamake.data.tokenize.encoder import Encoder
    from tokamake.runtime.cores import file_workers

    tokenizer = open_tokenizer(path)
    if special_tokens_in_text == "plain":
        tokenizer.read_special_tokens_as_text()
    encoder = Encoder(tokenizer, workers=file_workers())
    return lambda texts: encoder([*texts]).lengths.tolist()
