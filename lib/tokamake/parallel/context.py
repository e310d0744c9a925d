"""Context parallelism: the share of a sequence that each rank holds.

Each sample is cut into 2 C chunks for C ranks; rank r holds chunks r and 2 C - 1 - r, so that the
causal attention of all ranks costs the same. The trainer takes this rank's `share` of tokens,
labels and positions.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from tokamake.errors import UserError
from tokamake.parallel.axis import Axis

Method = Literal["ring", "ulysses"]
"""ring: keys and values move from rank to rank; ulysses: each rank has all tokens of some heads."""


def zigzag_indices(length: int, axis: Axis, *, device: torch.device | None = None) -> Tensor:
    """Indices of this rank's tokens, (length / C,) int64, ascending; 2 C divides the length."""
    check_length(length, axis.size)
    # Later tokens attend to more keys: an early and a late chunk give all ranks the same work.
    chunks = torch.arange(length, device=device).view(2 * axis.size, -1)
    return torch.cat((chunks[axis.rank], chunks[2 * axis.size - 1 - axis.rank]))


def share(x: Tensor, *, axis: Axis, dim: int = 1) -> Tensor:
    """This rank's tokens of a sequence whose length 2 C divides; all tokens on one rank."""
    if axis.size == 1:
        return x
    return x.index_select(dim, zigzag_indices(x.shape[dim], axis, device=x.device))


def check_length(sequence_length: int, context_parallel_size: int) -> None:
    """Check that a sequence can be cut into two equal chunks per context-parallel rank."""
    chunks = 2 * context_parallel_size
    if context_parallel_size > 1 and sequence_length % chunks:
        raise UserError(
            f"train.sequence_length: {sequence_length}: not a multiple of 2 × "
            f"context_parallel_size {context_parallel_size}, the chunks that a sample is cut in; "
            f"make it {math.ceil(sequence_length / chunks) * chunks}"
        )


def check_heads(num_heads: int, context_parallel_size: int) -> None:
    """Check that "ulysses" can divide the query heads of a tensor-parallel rank."""
    if num_heads % context_parallel_size:
        raise UserError(
            f"num_attention_heads / tensor_parallel_size: {num_heads} heads are not a multiple of "
            f"context_parallel_size {context_parallel_size}, over which ulysses shares them; "
            "change one of the three or set context_parallel_method to ring"
        )


def in_order(x: Tensor, dim: int) -> Tensor:
    """Put the ranks' chunks, (…, C, 2, …) from `dim` on, in the order of tokens, (…, 2 C, …)."""
    head, tail = x.unbind(dim + 1)
    return torch.cat((head, tail.flip(dim)), dim)


def by_rank(x: Tensor, dim: int) -> Tensor:
    """Group chunks in the order of tokens, (…, 2 C, …), by rank, (…, C, 2, …): undo `in_order`."""
    head, tail = x.chunk(2, dim)
    return torch.stack((head, tail.flip(dim)), dim + 1)
