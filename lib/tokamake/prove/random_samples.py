"""Random micro batches of a step, which all layouts divide among their ranks in the same way."""

from typing import Any

import numpy as np
import numpy.typing as npt

from tokamake.config.resolved_run import Run
from tokamake.data.samples.loader import PAD
from tokamake.parallel.mesh import Mesh
from tokamake.train.batch import SampleIds
from tokamake.train.objectives._base import ObjectiveBase

NUM_CORPORA = 2
"""Corpora that samples come from in turns."""
_END_SHARE = 0.1
"""Share of the tokens that end a document."""
_CUT_SHARE = 0.3
"""Share of the rows that end early; some end at once, so that they have no label."""


def step_samples(objective: ObjectiveBase, *, step: int) -> list[Any]:
    """Micro batches of a step in their order, of random tokens.

    Rows have unequal numbers of labels where the objective counts labels.
    """
    run = objective.run
    train = run.train
    num_batches = train.global_batch_size // train.micro_batch_size
    generators = (np.random.default_rng((run.seed, step, each)) for each in range(num_batches))
    return [_samples(objective, generator) for generator in generators]


def _samples(objective: ObjectiveBase, generator: np.random.Generator) -> Any:
    rows = objective.random_rows(generator)
    eod = objective.run.eod
    # Only rows of tokens alone have room for both.
    if not isinstance(rows, np.ndarray) or rows.dtype.names or eod is None:
        return rows
    tokens: npt.NDArray[np.int64] = np.where(generator.random(rows.shape) < _END_SHARE, eod, rows)
    if objective.counts_labels:
        ends = generator.integers(rows.shape[1] + 1, size=len(rows))
        is_cut = generator.random(len(rows)) < _CUT_SHARE
        ends = np.where(is_cut, ends, rows.shape[1])
        tokens[np.arange(rows.shape[1]) >= ends[:, None]] = PAD
    return tokens


def rank_samples(batches: list[Any], mesh: Mesh) -> list[Any]:
    """Micro batches of a data-parallel rank."""
    return batches[mesh.data.rank :: mesh.data.size]


def rank_ids(run: Run, mesh: Mesh, *, step: int) -> SampleIds:
    """Numbers of the samples of a data-parallel rank in the run; corpora take turns."""
    size, micro = run.train.global_batch_size, run.train.micro_batch_size
    numbers = np.arange(step * size, (step + 1) * size).reshape(-1, micro)
    own = numbers[mesh.data.rank :: mesh.data.size]
    return SampleIds(own, own % NUM_CORPORA, NUM_CORPORA)
