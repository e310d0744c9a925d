"""The whole estimate of a workflow: its data and its runs, and warnings."""

import math
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from tokamake.config.architecture import Architecture
from tokamake.config.data_set import RUN, DataSet
from tokamake.config.root import Config
from tokamake.data.corpus.corpora import Corpus
from tokamake.data.corpus.splits import FEWEST_DOCUMENTS, FEWEST_TOKENS, NAMES, shares
from tokamake.data.tokenizers import open_tokenizer
from tokamake.data.tokenizers._sentinels import appended_texts
from tokamake.errors import UserError
from tokamake.estimate.data import CorpusEstimate, DataEstimate, estimate_data
from tokamake.estimate.run import Allocation, Assumptions, RunEstimate, estimate_run
from tokamake.preflight.initial_models import InitialModel
from tokamake.preflight.planned import WorkflowConfig
from tokamake.units import in_bytes

_MOST_TEST_PERCENT = 10
"""Largest share of the documents that a test split is worth."""


class WorkflowEstimate(NamedTuple):
    """Data, runs, and warnings about both."""

    data: DataEstimate
    runs: list[RunEstimate]
    allocation: Allocation
    assumptions: Assumptions
    needed_bytes: float
    """Disk that data and checkpoints are still to take."""
    free_bytes: int
    warnings: list[str]

    def as_json(self) -> dict[str, Any]:
        """All numbers, with the names of the fields."""
        return {
            "data": {
                **self.data._asdict(),
                "corpora": [each._asdict() for each in self.data.corpora],
            },
            "runs": [{**run._asdict(), "memory": _memory_json(run)} for run in self.runs],
            "allocation": self.allocation._asdict(),
            "assumptions": self.assumptions._asdict(),
            "needed_bytes": self.needed_bytes,
            "free_bytes": self.free_bytes,
            "warnings": self.warnings,
        }


def _memory_json(run: RunEstimate) -> dict[str, Any] | None:
    return None if run.memory is None else {**run.memory._asdict(), "total": run.memory.total}


def estimate_workflow(
    config: WorkflowConfig,
    models: Mapping[str, InitialModel],
    *,
    allocation: Allocation,
    assumptions: Assumptions | None = None,
    sample_bytes: int,
) -> WorkflowEstimate:
    """Estimate the data and each run that pretrains.

    Args:
        models: initial model of each run, as far as it is known; others are left out.
        sample_bytes: see `estimate_data`.
    """
    shared = config.shared
    assumptions = assumptions or Assumptions()
    data = estimate_data(config, sample_bytes=sample_bytes, seed=shared.seed)
    runs = [
        estimate_run(
            run,
            config.tables[name],
            architecture=filled_in(models[name].architecture, config),
            tokens=data.tokens,
            allocation=allocation,
            assumptions=assumptions,
        )
        for name, run in config.runs.items()
        if name in models
    ]
    by_name = {corpus.corpus: corpus for corpus in data.corpora}
    warnings = [f"run {each.run}: {text}" for each in runs for text in each.warnings]
    for name, run in config.runs.items():
        warnings += _about_splits(run, config.tables[name], corpora=by_name)
    results = Path(RUN).parent
    disk = results if results.exists() else Path()
    needed, free = _needed_bytes(data, runs, data_set=config.data_set), shutil.disk_usage(disk).free
    if needed > free:
        warnings.append(
            f"data and checkpoints take about {in_bytes(round(needed))} more, and the disk of "
            f"{disk.resolve()} has {in_bytes(free)} left; free some space, set plan.keep_shards to "
            "false, or keep fewer checkpoints with train.keep_last"
        )
    warnings = [*dict.fromkeys(warnings)]
    return WorkflowEstimate(data, runs, allocation, assumptions, needed, free, warnings)


def _needed_bytes(data: DataEstimate, runs: list[RunEstimate], *, data_set: DataSet) -> float:
    """Disk that data and checkpoints are still to take, beside files of earlier jobs."""
    needed = 0.0
    if any(each.source not in ("built", "datasets") for each in data.corpora):
        sizes = {"shards": data.shards_bytes, "merged": data.merged_bytes}
        for name, size in sizes.items():
            needed += max(0.0, size - _size(Path(data_set.folder, name)))
    for run in runs:
        training = Path(RUN.format(run=run.run), "training")
        needed += max(0.0, run.checkpoints_bytes - _size(training))
    return needed


def _size(folder: Path) -> int:
    """Bytes of the files in a folder; 0: it does not exist."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # a job removes files meanwhile
                total += Path(parent, name).lstat().st_size
    return total


def filled_in(architecture: Architecture, config: WorkflowConfig) -> Architecture:
    """An architecture with its vocab_size: the tokenizer's, where the file states none."""
    if architecture.vocab_size is not None:
        return architecture
    return architecture.model_copy(update={"vocab_size": _vocab_size(config)})


def _vocab_size(config: WorkflowConfig) -> int:
    settings = config.shared.tokenizer
    paths = [Path(path) for path in config.run_tokenizer_files[:1]]
    if not settings.has_ids and paths and paths[0].is_file():
        return open_tokenizer(paths[0]).vocab_size
    given = config.given_tokenizer
    base = open_tokenizer(given[0]).vocab_size if given else settings.vocab_size
    return base + (len(appended_texts(settings.sentinels)) if settings.sentinels else 0)


def _about_splits(
    run: Config, table: list[Corpus], *, corpora: Mapping[str, CorpusEstimate]
) -> list[str]:
    """Warnings about splits without documents, and about a test split that is needlessly small."""
    try:
        split = dict(zip(NAMES, shares(run.train.split), strict=True))
    except UserError as error:
        return [str(error)]
    warnings = []
    for name in NAMES:
        parts = [(corpora[row.corpus], _share(row, name, split=split)) for row in table]
        if not any(share for _, share in parts):
            continue
        documents = sum(round(corpus.documents * share) for corpus, share in parts)
        tokens = sum(corpus.tokens * share for corpus, share in parts)
        is_known = all(corpus.documents for corpus, share in parts if share)
        where = f"run {run.run}: train.split: {run.train.split}"
        if is_known and not documents:
            warnings.append(f"{where}: the split {name} would have no document; give it more")
        elif name == "test" and (growth := _growth(tokens, documents if is_known else None)) > 1:
            is_share = split["test"] > 0 and any(row.is_split for row in table)
            percent = math.ceil(100 * split["test"] * growth)
            if is_share and percent > _MOST_TEST_PERCENT:
                continue  # there is too little text for any share; the report says so
            size = f"{documents:,} documents, " if is_known else ""
            remedy = f"give it {percent} %" if is_share else "name more of them in the column sets"
            warnings.append(
                f"{where}: the test split has about {size}{tokens:,.0f} tokens: its scores vary by "
                f"chance; {remedy}"
            )
    return warnings


def _growth(tokens: float, documents: int | None) -> float:
    """How much larger a test split has to be, so that chance does not decide between models."""
    by_documents = FEWEST_DOCUMENTS / documents if documents else 0
    return max(FEWEST_TOKENS / max(tokens, 1), by_documents)


def _share(row: Corpus, name: str, *, split: Mapping[str, float]) -> float:
    """Share of a corpus' documents that a split has."""
    if not row.is_split:
        begin, end = row.parts.get(name, (0.0, 0.0))
        return end - begin
    return split[name]
