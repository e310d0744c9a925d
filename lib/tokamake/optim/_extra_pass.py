"""A second pass over the micro batches of a step, for optimizers with the literal EXTRA_PASS."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from tokamake.parallel.mesh import SINGLE_RANK, Mesh

Relabel = Callable[[int, Tensor], Tensor]
"""Makes the labels of a micro batch, in their shape, from its number and its logits (..., V)."""


@dataclass(frozen=True)
class ExtraPass:
    """The micro batches of a step, and their gradients with other labels.

    A back end gives it to the optimizer's `prepare` before the gradients of each step, and drops
    the gradients afterwards.
    """

    gradients: Callable[[Relabel], int | None]
    """Computes gradients of the mean loss over all ranks, unscaled and unclipped, with the labels
    of `relabel`. Returns the number of labels; None: the gradients are not finite."""
    labels: Sequence[Tensor]
    """int64 labels of each micro batch, -100 for none: (B, L), or (N,) with `label_numbers`."""
    label_numbers: Sequence[Tensor | None]
    """(N,) flat index of each label in the (B, L) grid."""
    label_shape: Callable[[], tuple[int, int]]
    """(B, L) of the grid of labels, before it is cut for context parallelism."""
    vocab_size: int
    seed: int
    mesh: Mesh = SINGLE_RANK
