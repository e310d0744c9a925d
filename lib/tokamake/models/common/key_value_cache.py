"""Keys and values of earlier tokens, so that decoding computes each token once.

A cache has rows, one for each sequence. A pass extends some consecutive rows, each by a number of
tokens of its own. The memory of all rows grows in large steps, so that most passes copy nothing.
A layer with a window of W tokens keeps the last W of each row: token p is at place p % W.
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

    def in_window(self, window: int) -> "WindowPass":
        """The pass in layers with a window, which all have the same places."""
        if window not in self._in_windows:
            self._in_windows[window] = WindowPass(self, window)
        return self._in_windows[window]

    @cached_property
    def _in_windows(self) -> "dict[int, WindowPass]":
        return {}

    @cached_property
    def predicting_places(self) -> tuple[Tensor, Tensor]:
        """(N,) rows of the pass and columns whose successors the model predicts."""
        pairs = [(row, column) for row, kept in enumerate(self.predicting) for column in kept]
        rows, columns = torch.tensor(pairs, device=self.device).reshape(-1, 2).unbind(1)
        return rows, columns


class WindowPass:
    """A pass in layers that keep the last tokens of each row.

    One new token sees the places of its row, in any order. Several see the earlier tokens that the
    first one sees, in order, and then each other.
    """

    def __init__(self, this: CachePass, window: int) -> None:
        self._pass, self._window = this, window
        longest = max(this.starts)
        self.num_kept = min(longest + 1, window) if this.width == 1 else 0
        """Places that a single token sees; 0: there are several tokens."""
        self.num_earlier = min(longest, window - 1)
        """Earlier tokens that several tokens see."""

    @cached_property
    def earlier(self) -> tuple[Tensor, Tensor]:
        """(B, 1) rows of the cache and (B, earlier) places; a row's first tokens may be none."""
        this = self._pass
        back = torch.arange(-self.num_earlier, 0, device=this.device)
        starts = torch.tensor(this.starts, device=this.device)[:, None]
        rows = torch.arange(len(this.starts), device=this.device)[:, None] + this.first
        # Where a row has fewer tokens, the mask hides the place.
        return rows, (starts + back).clamp(min=0) % self._window

    @cached_property
    def places(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As `CachePass.places`, for the new tokens that later ones may see."""
        row, column, cache_row, place = self._pass.places
        counts = torch.tensor(self._pass.counts, device=self._pass.device)
        stays = column >= counts[row] - self._window
        return row[stays], column[stays], cache_row[stays], place[stays] % self._window

    @cached_property
    def mask(self) -> Tensor | None:
        """(B, 1, L, S) bool: whether a token sees another one; None: the window alone decides."""
        this, shortest = self._pass, min(self._pass.starts)
        if shortest >= (self.num_kept - 1 if self.num_kept else self.num_earlier):
            return None  # all rows fill the places
        starts = torch.tensor(this.starts, device=this.device)[:, None, None]
        if self.num_kept:
            return (torch.arange(self.num_kept, device=this.device) <= starts)[:, None]
        columns = torch.arange(-self.num_earlier, this.width, device=this.device)
        distances = torch.arange(this.width, device=this.device)[:, None] - columns
        is_near = (distances >= 0) & (distances < self._window)
        return (is_near & (columns >= -starts))[:, None]


class LayerCache:
    """Keys and values of one layer."""

    def __init__(self, cache: "KeyValueCache") -> None:
        self._cache = cache
        self.tensors: tuple[Tensor, Tensor] | None = None
        """(R, G, tokens, K) keys and values; None before the first pass. Layers with latent
        attention keep latent vectors and the rotated part of keys in their place."""

    def extend(
        self, k_BGLK: Tensor, v_BGLK: Tensor, *, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values of new tokens; return all that they see, (B, G, S, K)."""
        if not self._cache.is_kept:
            return k_BGLK, v_BGLK
        shape = k_BGLK.shape[1], k_BGLK.shape[3]
        width = v_BGLK.shape[3]
        tensors = self.with_room(*shape, value_width=width, like=k_BGLK, window=window)
        this = self._cache.this_pass
        rows = slice(this.first, this.first + len(this.starts))
        pairs = [*zip(tensors, (k_BGLK, v_BGLK), strict=True)]
        if window is not None:
            keys, values = (self._in_window(*pair, rows=rows, window=window) for pair in pairs)
            return keys, values
        for tensor, new in pairs:
            if this.is_even:
                tensor[rows, :, this.starts[0] : this.span] = new
            else:
                _put(tensor, new, places=this.places)
        keys, values = (tensor[rows, :, : this.span] for tensor in tensors)
        return keys, values

    def _in_window(self, tensor: Tensor, new: Tensor, *, rows: slice, window: int) -> Tensor:
        """Put new keys or values in their places; return those that the new tokens see."""
        this = self._cache.this_pass.in_window(window)
        if this.num_kept:
            _put(tensor, new, places=this.places)
            return tensor[rows, :, : this.num_kept]
        seen = new
        if this.num_earlier:
            row, place = this.earlier
            # Indices on both sides of a slice: torch puts their dimensions first.
            seen = torch.cat([tensor[row, :, place].transpose(1, 2), new], 2)
        _put(tensor, new, places=this.places)
        return seen

    def mask(self, mask: AttentionMask, *, window: int | None) -> AttentionMask:
        """The mask of the pass for the keys that `extend` returns."""
        if window is None or not self._cache.is_kept:
            return mask
        return self._cache.this_pass.in_window(window).mask

    def with_room(
        self,
        groups: int,
        width: int,
        *,
        like: Tensor,
        value_width: int | None = None,
        window: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The tensors, made twice as long if the tokens of the pass do not fit."""
        most = self._cache.capacity if window is None else min(window, self._cache.capacity)
        span, old = min(self._cache.this_pass.span, most), self.tensors
        length = old[0].shape[2] if old else 0
        if old and span <= length:
            return old
        longer = min(max(span, 2 * length, _FIRST_LENGTH), most)
        shape = self._cache.num_rows, groups, longer
        # Zeros: a weight of 0 would not remove the NaN of memory that nobody has set.
        keys = like.new_zeros(*shape, width)
        values = like.new_zeros(*shape, width if value_width is None else value_width)
        for tensor, shorter in zip((keys, values), old or (), strict=False):
            tensor[:, :, : shorter.shape[2]] = shorter
        self.tensors = keys, values
        return keys, values


def _put(tensor: Tensor, new: Tensor, *, places: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    """Copy new tokens, (B, G, L, K), to their places in the cache, (R, G, tokens, K)."""
    row, column, cache_row, place = places
    tensor[cache_row, :, place] = new[row, :, column]


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
