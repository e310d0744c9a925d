"""Dropout whose masks follow from counters: the same in every parallel layout.

Whether a number is dropped is a hash of seed, place in the model, sample, position and column
(counter-based random numbers: Salmon et al. 2011, doi 10.1145/2063384.2063405). No generator has a
state. So layouts, recomputation and restarts have the same masks, and the backward pass computes
them again instead of saving them.
Samples may share rows: then each token has the number of its sample, and its position there.
Shape suffixes: B rows, L tokens of this rank, S all tokens of a row, D columns, H heads.
"""

import hashlib
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tokamake.parallel.axis import Axis
from tokamake.runtime.torch_internals import not_compiled

Site = Literal[
    "embedding",
    "attention",
    "attention_output",
    "mlp_output",
    "decoder_embedding",
    "cross_attention",
    "cross_attention_output",
    "task_head",
]
"""Where numbers are dropped. In a layer: weights of attention, and additions to the residual
stream. Decoders of encoder-decoders have further sites. task_head: the input of a task's head."""

_BITS = 24
"""Bits of a hash that are compared with the rate."""
# Hashes have 32 bits in int64, and the factor has 27, so that no product overflows.
_WORD = 2**32 - 1
_FACTOR = 0x45D9F3B


class SampleTokens(NamedTuple):
    """Places of tokens in the run."""

    numbers: Tensor
    """(B, 1), or (B, L) if samples share rows: int64 number, in the run, of each token's sample."""
    positions: Tensor
    """(1, L), or (B, L) if samples share rows: int64 positions of tokens in their samples."""


class Dropout(NamedTuple):
    """Dropout of a forward pass, for the tokens of this rank."""

    hidden: float
    """Rate of a layer's addition to the residual stream."""
    attention: float
    """Rate of the weights of attention."""
    embedding: float
    """Rate of the states of the embedding."""
    seed: int
    tokens: SampleTokens
    """Tokens whose states this rank has."""
    heads: range
    """Attention heads of this rank, before context-parallel ranks exchange tokens for heads."""
    whole_rows: SampleTokens | None = None
    """All tokens of the rows, if samples share rows."""
    memory_positions: Tensor | None = None
    """(B, S) positions of the encoder's tokens in their samples, if samples share rows of a
    decoder."""

    # torch 2.13 compiles these integers wrongly for CPUs.
    @not_compiled
    def states(self, x_BLD: Tensor, site: Site, *, layer: Any = None) -> Tensor:
        """Drop numbers of states, and scale the rest so that the mean stays.

        Args:
            layer: module whose `number` is the layer's in the whole model; None: 0. A number
                would make torch.compile compile each layer for itself.
        """
        rate = self.embedding if site.endswith("embedding") else self.hidden
        if not rate:
            return x_BLD
        rows = _hashes(
            _key(self.seed, layer.number if layer else 0, site),
            [self.tokens.numbers[..., None], self.tokens.positions[..., None]],
        )
        columns_D = _column_hashes(x_BLD.shape[-1], x_BLD.device)
        result: Tensor = _Dropped.apply(x_BLD, *rows, columns_D, rate)
        return result

    @not_compiled
    def weights(
        self, weights_BHSS: Tensor, axis: Axis, *, layer: Any, site: Site = "attention"
    ) -> Tensor:
        """Drop weights of attention, and scale the rest.

        Args:
            weights_BHSS: (B, H, S, S) of all tokens of each row, of queries and of keys.
            axis: context-parallel ranks, which divide the heads of this rank.
        """
        num_heads, length = weights_BHSS.shape[1], weights_BHSS.shape[2]
        first = self.heads.start + axis.rank * num_heads
        device = weights_BHSS.device
        heads_H = torch.arange(first, first + num_heads, device=device)
        queries = self.whole_rows
        if queries is None:
            positions_BS = torch.arange(length, device=device)[None]
            queries = SampleTokens(self.tokens.numbers, positions_BS)
        rows = _hashes(
            _key(self.seed, layer.number, site),
            [
                queries.numbers[:, None, :, None],
                heads_H[:, None, None],
                queries.positions[:, None, :, None],
            ],
        )
        columns = self._key_hashes(weights_BHSS, site)
        result: Tensor = _Dropped.apply(weights_BHSS, *rows, columns, self.attention)
        return result

    def _key_hashes(self, weights_BHSS: Tensor, site: Site) -> Tensor:
        """A word for the position of each key, of a shape that broadcasts to the weights."""
        if self.whole_rows is None:
            return _column_hashes(weights_BHSS.shape[3], weights_BHSS.device)
        positions = self.whole_rows.positions
        if site == "cross_attention":
            assert self.memory_positions is not None
            positions = self.memory_positions
        return _mixed(positions + 1)[:, None, None]


def dropped(x_BLD: Tensor, dropout: Dropout | None, site: Site, *, layer: Any = None) -> Tensor:
    """The result of `Dropout.states`, or the states themselves without dropout."""
    return dropout.states(x_BLD, site, layer=layer) if dropout else x_BLD


def _key(seed: int, layer: int, site: Site) -> int:
    """A number of 64 bits for each place in the model."""
    text = f"{seed} {layer} {site}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _mixed(x: Tensor) -> Tensor:
    """Spread the information of a word over all of its bits (T. Mueller's hash of an int)."""
    for _ in range(2):
        x = ((x ^ (x >> 16)) * _FACTOR) & _WORD
    return x ^ (x >> 16)


def _hashes(key: int, counters: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Two words per combination of int64 counters >= 0; two, so that no rows share a mask."""
    words = []
    for start in (key & _WORD, key >> 32):
        state: Tensor | int = start
        for counter in counters:
            state = _mixed(state ^ (counter & _WORD))
            state = _mixed(state ^ (counter >> 32) ^ start)
        assert isinstance(state, Tensor)
        words.append(state)
    return words[0], words[1]


def _column_hashes(count: int, device: torch.device) -> Tensor:
    return _mixed(torch.arange(1, count + 1, device=device))


def _kept(first: Tensor, second: Tensor, *, columns: Tensor, rate: float) -> Tensor:
    """Which numbers are kept: True with probability 1 - rate; by two words a row, one a column."""
    x = first ^ columns
    x = ((x ^ (x >> 16)) * _FACTOR) & _WORD
    x = ((x ^ (x >> 16) ^ second) * _FACTOR) & _WORD
    return ((x ^ (x >> 16)) >> (32 - _BITS)) >= round(rate * 2**_BITS)


class _Dropped(torch.autograd.Function):
    """Dropout that saves only counters."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, first: Tensor, second: Tensor, columns: Tensor, rate: float
    ) -> Tensor:
        ctx.save_for_backward(first, second, columns)
        ctx.rate = rate
        return torch.where(_kept(first, second, columns=columns, rate=rate), x / (1 - rate), 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        first, second, columns = ctx.saved_tensors
        kept = _kept(first, second, columns=columns, rate=ctx.rate)
        return torch.where(kept, gradient / (1 - ctx.rate), 0), None, None, None, None
