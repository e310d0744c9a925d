"""Labels sampled from the model, for optimizers that need gradients of them (`prepare`)."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tokamake.parallel.context import share
from tokamake.parallel.loss import NO_LABEL, drawn
from tokamake.parallel.mesh import SINGLE_RANK, Mesh
from tokamake.train.batch import MicroBatch


def label_draws(
    num_batches: int,
    label_shape: tuple[int, int],
    *,
    seed: int,
    step: int,
    mesh: Mesh = SINGLE_RANK,
) -> list[Tensor]:
    """Random numbers in [0, 1) that draw each label of this rank, (B, L) fp32 for each batch.

    A token of a global batch has the same number however ranks share the batch. `label_shape` is
    `ObjectiveBase.label_shape` of its micro batches.
    """
    shape = (num_batches, mesh.data.size, *label_shape)
    # Drawn for all data-parallel ranks: the generator has no cheap way to skip numbers.
    all_ranks = np.random.default_rng((seed, step)).random(shape, dtype=np.float32)
    of_rank = torch.from_numpy(all_ranks[:, mesh.data.rank])
    return [*share(of_rank, axis=mesh.context, dim=2)]


def sampled_labels(
    logits: Tensor, batch: MicroBatch, draws: Tensor, *, mesh: Mesh, vocab_size: int
) -> Tensor:
    """Labels of a micro batch, in its shape, sampled by `draws` where it has labels."""
    labels, draws = batch.labels, draws.to(batch.labels.device)
    if batch.label_numbers is not None:
        draws = draws.flatten()[batch.label_numbers]
    elif missing := labels.shape[1] - draws.shape[1]:
        draws = F.pad(draws, (0, missing))  # of labels that fill up rows of a decoder
    return drawn(logits, draws, mesh, size=vocab_size).where(labels != NO_LABEL, labels)
