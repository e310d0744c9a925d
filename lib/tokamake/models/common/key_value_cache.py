"""Keys and values of earlier tokens, so that decoding computes each token once.

A cache has rows, one for each sequence. A pass extends some consecutive rows, each by a number of
tokens of its own. The memory of all rows grows in large steps, so that most passes copy nothing.
Shape suffixes: R rows, B rows of a pass, L tokens of a pass in a row, S tokens attended to, N
predicted tokens, G key and value heads, K width of a head.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tokamake.parallel.attention import AttentionMask

_FIRST_LENGTH = 256
"""Tokens for which rows have memory at first."""


@dataclass
class CachePass:
    """Tokens that a pass adds to the cache, at the end of consecutive rows."""

    first: int
    """First row."""
    starts: tuple[int, ...]
    """(B) tokens that each row had before."""
    counts: tuple[int, ...]
    """(B) new tokens of each row; columns beyond them are padding."""
    width: int
    """L: columns of the pass."""
    device: torch.device
    predicting: tuple[range, ...]
    """(B) columns of each row whose successors the model predicts."""

    @property
    def span(self) -> int:
        """S: tokens of the longest row, with padding."""
        return max(self.starts) + self.width

    def first_seen(self, window: int | None) -> int:
        """First place that a new token of some row sees."""
        return 0 if window is None else max(0, min(self.starts) + 1 - window)

    @property
    def is_even(self) -> bool:
        """Whether all rows have the same lengths before and after the pass."""
        return len(set(self.starts)) == 1 and set(self.counts) == {self.width}

    @cached_property
    def positions(self) -> Tensor:
        """Positions of the tokens: (L,) if they are the same in all rows, else (B, L)."""
        columns = torch.arange(self.width, device=self.device)
        if len(set(self.starts)) == 1:
            return columns + self.starts[0]
        return columns + torch.tensor(self.starts, device=self.device)[:, None]

    @cached_property
    def mask(self) -> Tensor | None:
        """(B, 1, L, S) bool: whether a token sees another one; None: itself and all before it."""
        if len(set(self.starts)) == 1:
            return None  # rows with fewer new tokens end with padding, which no token sees
        places = torch.arange(self.span, device=self.device)
        return (places <= self.positions[..., None])[:, None]

    @cached_property
    def places(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Places of the new tokens: row of the pass, column, row of the cache, index in it."""
        columns = torch.arange(self.width, device=self.device)
        counts = torch.tensor(self.counts, device=self.device)
        rows, columns = (columns < counts[:, None]).nonzero(as_tuple=True)
        starts = torch.tensor(self.starts, device=self.device)
        return rows, columns, rows + self.first, columns + starts[rows]

    @cached_property
    def predicting_places(self) -> tuple[Tensor, Tensor]:
        """(N,) rows of the pass and columns whose successors the model predicts."""
        pairs = [(row, column) for row, kept in enumerate(self.predicting) for column in kept]
        rows, columns = torch.tensor(pairs, device=self.device).reshape(-1, 2).unbind(1)
        return rows, columns


class LayerCache:
    """Keys and values of one layer."""

    def __init__(self, cache: "KeyValueCache") -> None:
        self._cache = cache
        self.tensors: tuple[Tensor, Tensor] | None = None
        """(R, G, tokens, K) keys and values; None before the first pass."""

    def extend(
        self, k_BGLK: Tensor, v_BGLK: Tensor, *, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values of new tokens; return all keys and values, (B, G, S, K).

        With a window, S begins with the first token that some new token sees.
        """
        if not self._cache.is_kept:
            return k_BGLK, v_BGLK
        keys, values = self.with_room(k_BGLK.shape[1], k_BGLK.shape[3], like=k_BGLK)
        this = self._cache.this_pass
        rows = slice(this.first, this.first + len(this.starts))
        for tensor, new in ((keys, k_BGLK), (values, v_BGLK)):
            if this.is_even:
                tensor[rows, :, this.starts[0] : this.span] = new
            else:
                row, column, cache_row, place = this.places
                tensor[cache_row, :, place] = new[row, :, column]
        seen = slice(this.first_seen(window), this.span)
        return keys[rows, :, seen], values[rows, :, seen]

    def mask(self, mask: AttentionMask, *, window: int | None) -> AttentionMask:
        """The mask of the pass for the keys that `extend` returns."""
        if window is None or not isinstance(mask, Tensor):
            return mask
        # Not `ScoreRules` alone: rows of different lengths have the same place in other columns.
        this = self._cache.this_pass
        seen = torch.arange(this.first_seen(window), this.span, device=mask.device)
        near_BLS = torch.atleast_2d(this.positions)[..., None] - seen < window
        return mask[..., this.first_seen(window) :] & near_BLS[:, None]

    def with_room(self, groups: int, width: int, *, like: Tensor) -> tuple[Tensor, Tensor]:
        """The tensors, made twice as long if the tokens of the pass do not fit."""
        span, old = self._cache.this_pass.span, self.tensors
        length = old[0].shape[2] if old else 0
        if old and span <= length:
            return old
        longer = min(max(span, 2 * length, _FIRST_LENGTH), self._cache.capacity)
        shape = self._cache.num_rows, groups, longer, width
        # Zeros: a weight of 0 would not remove the NaN of memory that nobody has set.
        keys, values = like.new_zeros(shape), like.new_zeros(shape)
        for tensor, shorter in zip((keys, values), old or (), strict=False):
            tensor[:, :, : shorter.shape[2]] = shorter
        self.tensors = keys, values
        return keys, values


class KeyValueCache:
    """Keys and values of all layers of this rank.

    Args:
        num_rows: R, sequences.
        capacity: longest sequence in tokens.
        is_kept: False for a single pass, whose keys and values are not needed later.
    """

    def __init__(
        self, num_layers: int, num_rows: int, *, capacity: int, is_kept: bool = True
    ) -> None:
        self.num_rows, self.capacity, self.is_kept = num_rows, capacity, is_kept
        self.lengths = [0] * num_rows
        """Tokens of each row."""
        self.layers = [LayerCache(self) for _ in range(num_layers)]
        self._pass: CachePass | None = None

    @property
    def this_pass(self) -> CachePass:
        assert self._pass is not None, "begin a pass first"
        return self._pass

    def begin(
        self,
        counts: Sequence[int],
        width: int,
        *,
        first: int = 0,
        device: torch.device,
        predicting: Sequence[range] | None = None,
    ) -> CachePass:
        """Begin a pass; `end` it after the model has run.

        Args:
            counts: new tokens of each row, at most `width`.
            predicting: columns of each row whose successors the model predicts; None: the
                columns of the last new tokens.
        """
        starts = tuple(self.lengths[first : first + len(counts)])
        assert len(starts) == len(counts)
        assert max(starts) + width <= self.capacity
        if predicting is None:
            predicting = [range(count - 1, count) for count in counts]
        self._pass = CachePass(first, starts, tuple(counts), width, device, tuple(predicting))
        return self._pass

    def end(self) -> None:
        """Count the tokens of the pass."""
        this = self.this_pass
        for row, count in enumerate(this.counts, this.first):
            self.lengths[row] += count

    def move(self, source: int, target: int) -> None:
        """Copy a row to another one."""
        length = self.lengths[source]
        for layer in self.layers:
            for tensor in layer.tensors or ():
                tensor[target, :, :length] = tensor[source, :, :length]
        self.lengths[target] = length

    def reorder(self, sources: Sequence[int]) -> None:
        """Let row i continue the sequence of row `sources[i]`, for beams."""
        rows, length = len(sources), max(self.lengths)
        for layer in self.layers:
            for tensor in layer.tensors or ():
                tensor[:rows, :, :length] = tensor[list(sources), :, :length]
        self.lengths[:rows] = [self.lengths[source] for source in sources]

    def clear(self, row: int) -> None:
        """Forget the sequence of a row."""
        for layer in self.layers:
            for tensor in layer.tensors or ():
                # A weight of 0 would not remove NaN from the next sequence.
                tensor[row, :, : self.lengths[row]] = 0
        self.lengths[row] = 0
