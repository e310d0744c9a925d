"""How a sequence is shared over context-parallel ranks, and which of its documents are where.

Each sample is cut into 2 C chunks for C ranks; rank r holds chunks r and 2 C - 1 - r, so that all
have as much causal attention to compute. The trainer takes a rank's `share` of tokens, labels and
positions; the model makes a `document_mask` of the shares' ids, which `attention` takes.
Shape suffixes: B batch, L tokens of a rank, N chunks of all ranks.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from tokamake.errors import UserError
from tokamake.parallel.axis import Axis

Method = Literal["ring", "ulysses"]
"""Keys and values go round a ring of ranks; or each rank gets all tokens of some heads."""

Relation = Literal["apart", "same", "mixed"]
"""Whether tokens of two chunks share no document, are all of one, or neither."""


def zigzag_indices(length: int, axis: Axis, device: torch.device | None = None) -> Tensor:
    """Where a rank's tokens lie in the whole sequence, (length / C,) int64, ascending.

    Raises:
        UserError: the sequence does not fall into 2 C equal chunks.
    """
    check_length(length, axis.size)
    chunks = torch.arange(length, device=device).view(2 * axis.size, -1)
    return torch.cat((chunks[axis.rank], chunks[2 * axis.size - 1 - axis.rank]))


def share(x: Tensor, *, axis: Axis, dim: int = 1) -> Tensor:
    """A rank's part of a tensor along its dimension of tokens; the tensor itself for one rank.

    Raises:
        UserError: the sequence does not fall into 2 C equal chunks.
    """
    if axis.size == 1:
        return x
    return x.index_select(dim, zigzag_indices(x.shape[dim], axis, x.device))


def check_length(sequence_length: int, context_parallel_size: int) -> None:
    """Refuse a sequence that does not fall into equal chunks, two a context-parallel rank.

    Raises:
        UserError: so it is.
    """
    chunks = 2 * context_parallel_size
    if context_parallel_size > 1 and sequence_length % chunks:
        raise UserError(
            f"train.sequence_length: {sequence_length}: not a multiple of 2 × "
            f"context_parallel_size {context_parallel_size}, the chunks that a sample is cut in; "
            f"make it {math.ceil(sequence_length / chunks) * chunks}"
        )


def check_heads(num_heads: int, context_parallel_size: int) -> None:
    """Refuse query heads, of one tensor-parallel rank, that "ulysses" cannot share out.

    Raises:
        UserError: so it is.
    """
    if num_heads % context_parallel_size:
        raise UserError(
            f"num_attention_heads / tensor_parallel_size: {num_heads} heads are not a multiple of "
            f"context_parallel_size {context_parallel_size}, over which ulysses shares them; "
            "change one of the three or set context_parallel_method to ring"
        )


def in_order(x: Tensor, dim: int) -> Tensor:
    """Chunks of all ranks, (…, C, 2, …) from `dim` on, as (…, 2 C, …) in the order of tokens."""
    head, tail = x.unbind(dim + 1)
    return torch.cat((head, tail.flip(dim)), dim)


def by_rank(x: Tensor, dim: int) -> Tensor:
    """Chunks in the order of tokens, (…, 2 C, …), as each rank holds them, (…, C, 2, …)."""
    head, tail = x.chunk(2, dim)
    return torch.stack((head, tail.flip(dim)), dim + 1)


@dataclass(frozen=True)
class Documents:
    """Documents of samples that are shared over ranks, as the ring needs them."""

    ids_BNL: Tensor
    """Each token's document, of all chunks in the order of tokens."""
    relations: list[list[Relation]]
    """Of a chunk of queries and one of keys, over all samples of the batch."""

    @classmethod
    def of(cls, ids_BNL: Tensor) -> "Documents":
        """Compare chunks; this waits for the device, so it is done once for all layers."""
        low_BN, high_BN = ids_BNL.amin(2), ids_BNL.amax(2)
        apart_BNN = low_BN[:, :, None] > high_BN[:, None]
        apart_NN = (apart_BNN | apart_BNN.mT).all(0)
        single_BNN = (low_BN[:, :, None] == high_BN[:, None]) & (low_BN == high_BN)[:, None]
        same_NN = (single_BNN & single_BNN.mT).all(0)
        names: tuple[Relation, ...] = ("mixed", "same", "apart")
        codes = (same_NN + 2 * apart_NN).tolist()
        return cls(ids_BNL, [[names[code] for code in row] for row in codes])

    def bias(self, query: int, key: int, dtype: torch.dtype) -> Tensor:
        """(B, 1, L, L) to add to scores of two chunks: 0 where a token sees another.

        Elsewhere it is a huge number, not infinity: a row that sees nothing has then a weight of 0
        when blocks are merged, and no kernel makes it NaN.
        """
        seen_BLL = self.ids_BNL[:, query, :, None] == self.ids_BNL[:, key, None]
        if query == key:
            seen_BLL = seen_BLL.tril()
        bias_BLL = torch.zeros(seen_BLL.shape, dtype=dtype, device=seen_BLL.device)
        return bias_BLL.masked_fill_(~seen_BLL, torch.finfo(dtype).min / 2)[:, None]


class PackedDocuments:
    """Documents of samples whose tokens are all on this rank, in the forms that kernels take.

    Args:
        ids_BL: each token's document; those of a document follow one another.
    """

    def __init__(self, ids_BL: Tensor) -> None:
        self._ids_BL = ids_BL

    @cached_property
    def bounds(self) -> Tensor:
        """Where documents begin in rows laid end to end, and the end of the last; int32."""
        begins_BL = torch.ones_like(self._ids_BL, dtype=torch.bool)
        begins_BL[:, 1:] = self._ids_BL[:, 1:] != self._ids_BL[:, :-1]
        found = begins_BL.flatten().nonzero()[:, 0]
        return F.pad(found, (0, 1), value=begins_BL.numel()).int()

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each document; this waits for the device, once for all layers."""
        found: list[int] = self.bounds.diff().tolist()
        return found

    @cached_property
    def mask(self) -> Tensor:
        """(B, 1, L, L) bool: whether a token sees another, itself or one before it."""
        length = self._ids_BL.shape[1]
        same_BLL = self._ids_BL[:, :, None] == self._ids_BL[:, None, :]
        return (same_BLL & same_BLL.new_ones(length, length).tril())[:, None]


def document_mask(ids_BL: Tensor, *, axis: Axis, method: Method) -> PackedDocuments | Documents:
    """What `attention` takes so that no token sees those of other documents.

    All ranks of the axis call it, once a forward pass.

    Args:
        ids_BL: (B, L) integers, the document of each token of this rank's `share`.
        axis: the context-parallel ranks.
        method: of attention.

    Returns:
        For one rank and "ulysses", documents of the tokens of all ranks; for "ring", of chunks.
    """
    if axis.size == 1:
        return PackedDocuments(ids_BL)
    shares = [torch.empty_like(ids_BL) for _ in range(axis.size)]
    dist.all_gather(shares, ids_BL.contiguous(), group=axis.group)
    ids_BNL = in_order(torch.stack(shares, 1).unflatten(2, (2, -1)), 1)
    return Documents.of(ids_BNL) if method == "ring" else PackedDocuments(ids_BNL.flatten(1))
