"""Chunks of a batch, and the neighbors that each of them may attend to.

A chunk is `chunk_length` tokens of a sequence; its neighbors are texts that resemble it. They reach
the tokens from the chunk's last one to the one before the next chunk's last: earlier tokens must
not see what resembles their successors.
Shape suffixes: B batch, L tokens, C chunks of a sequence, N chunks of the batch, k neighbors of a
chunk, r tokens of a neighbor, S tokens of all neighbors of a chunk, m tokens of a chunk, W tokens
that attend to a chunk's neighbors, D hidden size.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from tokamake.parallel.dropout import Dropout, SampleTokens


class Chunks(Protocol):
    """Places of chunks in the rows of a batch, and of the tokens that attend to their neighbors."""

    @property
    def num_neighbors(self) -> int:
        """k."""

    @property
    def is_empty(self) -> bool:
        """Whether no token attends to a neighbor."""

    @property
    def attends_BL1(self) -> Tensor:
        """(B, L, 1) bool: whether a token attends to a neighbor."""

    def states(self, x_BLD: Tensor) -> Tensor:
        """States (N, m, D) of the tokens of each chunk."""

    def attending(self, x_BLD: Tensor) -> Tensor:
        """States (N, W, D) of the tokens that attend to each chunk's neighbors."""

    def in_rows(self, y_NWD: Tensor) -> Tensor:
        """The inverse of `attending`, (B, L, D); tokens that attend to nothing have 0."""

    def kept(self, keys_NGSK: Tensor, values_NGSK: Tensor, *, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the neighbors to which `attending` attends, of a layer."""

    @property
    def mask_N11S(self) -> Tensor:
        """(N, 1, 1, S) bool: whether a token of `kept` is attended to."""

    def dropout(self, dropout: Dropout) -> Dropout:
        """Dropout of the tokens of `attending`."""


class Neighbors(NamedTuple):
    """Tokens of the neighbors of each chunk of a batch, before the encoder reads them."""

    x_NrD: Tensor
    """(N × k, r, D) embedded tokens, of this rank's `own_tokens`."""
    is_token_Nr: Tensor
    """(N × k, r) bool: False for fill; a neighbor that is missing is fill."""
    chunks: Chunks
    dropout: Dropout | None
    """Dropout of the encoder."""


class EncodedNeighbors(NamedTuple):
    """States of the neighbors of each chunk, after the encoder."""

    x_NrD: Tensor
    """(N × k, r, D) `shared_input` of the states: all layers share it."""
    chunks: Chunks


class ChunkGrid:
    """Whole sequences, with as many neighbors for each of their chunks.

    Args:
        is_token_BCkr: (B, C, k, r) bool: False for fill.
        length: m.
    """

    is_empty = False

    def __init__(self, is_token_BCkr: Tensor, length: int) -> None:
        self._length = length
        self._rows, self._chunks, self.num_neighbors = is_token_BCkr.shape[:3]
        is_token_NS = is_token_BCkr.flatten(0, 1).flatten(1)
        has_neighbor_N1 = is_token_NS.any(1, keepdim=True)
        # A softmax over nothing would be NaN; `attends_BL1` discards its result.
        self.mask_N11S = (is_token_NS | ~has_neighbor_N1)[:, None, None]
        attends_BL = has_neighbor_N1.view(self._rows, -1).repeat_interleave(length, 1)
        self.attends_BL1 = self._shifted(attends_BL)[..., None]

    def _shifted(self, x_BL: Tensor) -> Tensor:
        """Move what belongs to a chunk to the tokens that attend to its neighbors."""
        before = self._length - 1
        return F.pad(x_BL[:, : x_BL.shape[1] - before], (before, 0))

    def states(self, x_BLD: Tensor) -> Tensor:
        return x_BLD.unflatten(1, (self._chunks, self._length)).flatten(0, 1)

    def attending(self, x_BLD: Tensor) -> Tensor:
        before = self._length - 1
        return self.states(F.pad(x_BLD[:, before:], (0, 0, 0, before)))

    def in_rows(self, y_NWD: Tensor) -> Tensor:
        before = self._length - 1
        y_BLD = y_NWD.unflatten(0, (self._rows, self._chunks)).flatten(1, 2)
        return F.pad(y_BLD[:, : y_BLD.shape[1] - before], (0, 0, before, 0))

    def kept(
        self,
        keys_NGSK: Tensor,
        values_NGSK: Tensor,
        *,
        layer: int,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor]:
        return keys_NGSK, values_NGSK

    def dropout(self, dropout: Dropout) -> Dropout:
        """Dropout by the number of each chunk in the run."""
        numbers_BC = counted(dropout.tokens.numbers, self._chunks)
        positions = torch.arange(self._length, device=numbers_BC.device)[None]
        return dropout._replace(tokens=SampleTokens(numbers_BC.view(-1, 1), positions))


def counted(numbers_N1: Tensor, size: int) -> Tensor:
    """(N, size) numbers of the parts of numbered things, each of `size` parts."""
    return numbers_N1 * size + torch.arange(size, device=numbers_N1.device)
