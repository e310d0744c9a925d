"""Random micro batches of a step, which all layouts divide among their ranks in the same way."""

from typing import Any

import numpy as np
import numpy.typing as npt

from tokamake.config.resolved_run import Run
from tokamake.data.samples.loader import PAD
from tokamake.parallel.loss import NO_LABEL
from tokamake.parallel.mesh import Mesh
from tokamake.train.batch import SampleIds
from tokamake.train.objectives._base import ObjectiveBase
from tokamake.train.objectives._tasks import TaskObjective

NUM_CORPORA = 2
"""Corpora that samples come from in turns."""
_END_SHARE = 0.1
"""Share of the tokens that end a document."""
_CUT_SHARE = 0.3
"""Share of the rows that end early; some end at once, so that they have no label."""


def step_samples(objective: ObjectiveBase, *, step: int) -> list[Any]:
    """Micro batches of a step in their order, of random tokens.

    Rows have unequal numbers of labels, and some have padding, where the objective knows it.
    """
    run = objective.run
    num_batches = _step_size(run, step) // run.train.micro_batch_size
    generators = (np.random.default_rng((run.seed, step, each)) for each in range(num_batches))
    batches = [_samples(objective, generator) for generator in generators]
    if isinstance(objective, TaskObjective):  # its rows say how many of the step have a label
        num_labels = sum(batch.num_labels for batch in batches)
        batches = [batch._replace(num_labels=num_labels) for batch in batches]
    return batches


def _step_size(run: Run, step: int) -> int:
    """Samples of a step."""
    sizes = run.train.batch_sizes
    return sizes.at(sizes.samples(step))


def _samples(objective: ObjectiveBase, generator: np.random.Generator) -> Any:
    rows = objective.random_rows(generator)
    if hasattr(rows, "padding_mask"):
        return _padded(rows, generator)
    if not isinstance(rows, np.ndarray):
        return rows
    if not rows.dtype.names:
        return _documents(objective, rows, generator)
    for name in rows.dtype.names:  # records: some of their texts are shorter
        if name.startswith("num_"):
            rows[name] = generator.integers(1, rows[name] + 1)
    if "tokens" in rows.dtype.names:
        rows["tokens"] = _documents(objective, rows["tokens"], generator)
    return rows


def _documents(
    objective: ObjectiveBase, rows: npt.NDArray[np.int64], generator: np.random.Generator
) -> npt.NDArray[np.int64]:
    """Rows of several documents; some rows end early."""
    if (eod := objective.run.eod) is None:
        return rows
    tokens: npt.NDArray[np.int64] = np.where(generator.random(rows.shape) < _END_SHARE, eod, rows)
    if objective.counts_labels:
        ends = generator.integers(rows.shape[1] + 1, size=len(rows))
        is_cut = generator.random(len(rows)) < _CUT_SHARE
        ends = np.where(is_cut, ends, rows.shape[1])
        tokens[np.arange(rows.shape[1]) >= ends[:, None]] = PAD
    return tokens


def _padded(rows: Any, generator: np.random.Generator) -> Any:
    """Rows of an encoder, some of them with padding, which has no label."""
    number, length = rows.tokens.shape
    is_cut = generator.random(number) < _CUT_SHARE
    lengths = np.where(is_cut, generator.integers(1, length + 1, size=number), length)[:, None]
    is_token = np.arange(length) < lengths
    changed = {"padding_mask": is_token, "tokens": np.where(is_token, rows.tokens, 0)}
    if rows.labels.ndim == 2:  # labels of tokens
        width = rows.labels.shape[1]
        has_label = np.arange(width) < lengths * width // length
        changed["labels"] = np.where(has_label, rows.labels, NO_LABEL)
    return rows._replace(**changed)


def rank_samples(batches: list[Any], mesh: Mesh) -> list[Any]:
    """Micro batches of a data-parallel rank."""
    return batches[mesh.data.rank :: mesh.data.size]


def rank_ids(objective: ObjectiveBase, mesh: Mesh, *, step: int) -> SampleIds:
    """Numbers of the samples of a data-parallel rank in the run; corpora take turns."""
    run = objective.run
    first, size = run.train.batch_sizes.samples(step), _step_size(run, step)
    numbers = np.arange(first, first + size).reshape(-1, run.train.micro_batch_size)
    own = numbers[mesh.data.rank :: mesh.data.size]
    options = objective.num_sequences
    of_sequences = (own[:, :, None] * options + np.arange(options)).reshape(len(own), -1)
    return SampleIds(of_sequences, own % NUM_CORPORA, NUM_CORPORA)
