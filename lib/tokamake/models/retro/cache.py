"""Generation with retrieval: neighbors of chunks as soon as their last token is known.

The cache keeps, for each row, the tokens and states of the chunk that is not complete yet, and keys
and values of the neighbors of the last complete one. See `chunks` for the shapes; R rows of the
cache, G key heads, K width of a head.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tokamake.models.common.key_value_cache import CachePass, KeyValueCache
from tokamake.parallel.dropout import Dropout

Numbers = npt.NDArray[np.int64]


class Retriever(Protocol):
    """Finds neighbors."""

    def __call__(self, chunks: Numbers) -> tuple[Numbers, Numbers]:
        """Neighbors of chunks.

        Args:
            chunks: (n, m) tokens; n is 1 or more.

        Returns:
            (n, k, r) tokens, and (n, k) number of them that are no fill, 0 for a missing neighbor;
            k and r are always the same.
        """


def retrieved(
    chunks: Numbers, retriever: Retriever, *, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Neighbors of chunks (n, m) as tensors: (n, k, r) tokens, and (n, k) how many are no fill."""
    tokens, counts = (torch.from_numpy(found).to(device) for found in retriever(chunks))
    return tokens, counts


class _Attending(NamedTuple):
    """Tokens of a pass that attend to the neighbors of a chunk."""

    row: int
    """Row of the pass."""
    columns: range
    number: int | None
    """Number of the chunk among those that the pass completes; None: an earlier pass has
    completed it."""


class CachedChunks:
    """Chunks that a pass completes, and the tokens that attend to neighbors."""

    def __init__(self, cache: "RetroCache", tokens_BL: Tensor) -> None:
        self._cache, self._pass = cache, cache.this_pass
        length = cache.chunk_length
        completed: list[Numbers] = []
        self._attending: list[_Attending] = []
        self._last: dict[int, int] = {}
        """Number of the last chunk that each row of the pass completes."""
        for row, (start, count) in enumerate(_extents(self._pass)):
            known = cache.tokens_of(self._pass.first + row)
            known = np.append(known, tokens_BL[row, :count].cpu().numpy())
            chunks = known[: len(known) // length * length].reshape(-1, length)
            first = start // length - len(completed)
            for chunk in range(max(0, start // length - 1), (start + count) // length):
                begin, stop = ((chunk + n) * length - 1 - start for n in (1, 2))
                number = chunk - first if chunk >= start // length else None
                columns = range(max(0, begin), min(count, stop))
                if columns:
                    self._attending.append(_Attending(row, columns, number))
            if len(chunks):
                self._last[row] = len(completed) + len(chunks) - 1
            completed += [*chunks]
            cache.keep_tokens(self._pass.first + row, known[len(chunks) * length :])
        self.tokens_Nkr, self.counts_Nk = cache.retrieved(completed, device=tokens_BL.device)
        self._mask()

    def _mask(self) -> None:
        """Make the masks of the neighbors to which tokens attend, and keep the last ones."""
        positions = torch.arange(self.tokens_Nkr.shape[2], device=self.tokens_Nkr.device)
        is_token_NS = (positions < self.counts_Nk[..., None]).flatten(1)
        mask_NS = self._chosen(is_token_NS, layer=None)
        has_neighbor_N1 = mask_NS.any(1, keepdim=True)
        self.mask_N11S = (mask_NS | ~has_neighbor_N1)[:, None, None]
        attends_BL = torch.zeros(
            len(self._pass.counts), self._pass.width, dtype=torch.bool, device=mask_NS.device
        )
        for each, has_neighbor in zip(self._attending, has_neighbor_N1, strict=True):
            attends_BL[each.row, each.columns.start : each.columns.stop] = has_neighbor
        self.attends_BL1 = attends_BL[..., None]

    def _chosen(self, new: Tensor, *, layer: tuple[int, int] | None) -> Tensor:
        """Choose entries of chunks to which tokens attend, and keep the entry of the last chunk."""
        kept = self._cache.kept_of(layer, like=new)
        first = self._pass.first
        chosen = [
            kept[first + each.row] if each.number is None else new[each.number]
            for each in self._attending
        ]
        result = torch.stack(chosen) if chosen else new[:0]
        for row, number in self._last.items():
            kept[first + row] = new[number]
        return result

    @property
    def num_neighbors(self) -> int:
        return self.tokens_Nkr.shape[1]

    @property
    def is_empty(self) -> bool:
        return not self._attending

    def states(self, x_BLD: Tensor) -> Tensor:
        """States (N, m, D) of the chunks that the pass completes; later states are kept."""
        length, complete = self._cache.chunk_length, [x_BLD.new_zeros(0, *x_BLD.shape[2:])]
        kept_RmD = self._cache.states_of(like=x_BLD)
        for row, (start, count) in enumerate(_extents(self._pass)):
            own_mD = kept_RmD[self._pass.first + row]
            known = torch.cat((own_mD[: start % length], x_BLD[row, :count]))
            end = len(known) // length * length
            complete.append(known[:end])
            own_mD[: len(known) - end] = known[end:]
        return torch.cat(complete).unflatten(0, (-1, length))

    def attending(self, x_BLD: Tensor) -> Tensor:
        rows, columns, _ = self._places(x_BLD.device)
        return x_BLD[rows, columns]

    def in_rows(self, y_NWD: Tensor) -> Tensor:
        rows, columns, is_column = self._places(y_NWD.device)
        y_BLD = y_NWD.new_zeros(len(self._pass.counts), self._pass.width, y_NWD.shape[-1])
        y_BLD[rows.expand_as(columns)[is_column], columns[is_column]] = y_NWD[is_column]
        return y_BLD

    def _places(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Rows (N, 1) and columns (N, W) of tokens, and which of them (N, W) are no fill."""
        starts = torch.tensor([each.columns.start for each in self._attending], device=device)
        counts = torch.tensor([len(each.columns) for each in self._attending], device=device)
        rows = torch.tensor([each.row for each in self._attending], device=device)
        offsets = torch.arange(max(map(len, (e.columns for e in self._attending))), device=device)
        is_column = offsets < counts[:, None]
        columns = starts[:, None] + torch.where(is_column, offsets, 0)
        return rows[:, None], columns, is_column

    def kept(self, keys_NGSK: Tensor, values_NGSK: Tensor, *, layer: int) -> tuple[Tensor, Tensor]:
        return (
            self._chosen(keys_NGSK, layer=(layer, 0)),
            self._chosen(values_NGSK, layer=(layer, 1)),
        )

    def dropout(self, dropout: Dropout) -> Dropout:  # noqa: ARG002
        raise AssertionError("nothing is dropped while text is generated")


def _extents(this: CachePass) -> list[tuple[int, int]]:
    """Tokens of each row before the pass, and new ones."""
    return [*zip(this.starts, this.counts, strict=True)]


class RetroCache(KeyValueCache):
    """Keys and values of earlier tokens, and neighbors of the last complete chunk of each row.

    Attributes:
        chunks: of the pass that has begun.
    """

    chunks: CachedChunks

    def __init__(
        self,
        num_layers: int,
        num_rows: int,
        *,
        capacity: int,
        retriever: Retriever,
        chunk_length: int,
        is_kept: bool = True,
    ) -> None:
        super().__init__(num_layers, num_rows, capacity=capacity, is_kept=is_kept)
        self.chunk_length, self._retriever = chunk_length, retriever
        self._tokens = [np.zeros(0, np.int64) for _ in range(num_rows)]
        self._states: Tensor | None = None
        self._kept: dict[tuple[int, int] | None, Tensor] = {}
        self._shape = (1, 1)
        """k and r, once they are known."""

    def retrieve(self, tokens_BL: Tensor) -> None:
        """Find the neighbors of the chunks that the tokens of this pass complete."""
        self.chunks = CachedChunks(self, tokens_BL)

    def tokens_of(self, row: int) -> Numbers:
        """Tokens of the chunk that is not complete."""
        return self._tokens[row]

    def keep_tokens(self, row: int, tokens: Numbers) -> None:
        """Keep tokens of the chunk that is not complete."""
        self._tokens[row] = tokens

    def retrieved(self, chunks: list[Numbers], *, device: torch.device) -> tuple[Tensor, Tensor]:
        """Neighbors of chunks: tokens (N, k, r), and how many of them (N, k) are no fill."""
        if not chunks:
            return (
                torch.zeros(0, *self._shape, dtype=torch.int64, device=device),
                torch.zeros(0, self._shape[0], dtype=torch.int64, device=device),
            )
        tokens, counts = retrieved(np.stack(chunks), self._retriever, device=device)
        self._shape = tokens.shape[1], tokens.shape[2]
        return tokens, counts

    def states_of(self, *, like: Tensor) -> Tensor:
        """(R, m, D) states of the chunks that are not complete."""
        if self._states is None:
            self._states = like.new_zeros(self.num_rows, self.chunk_length, like.shape[-1])
        return self._states

    def kept_of(self, layer: tuple[int, int] | None, *, like: Tensor) -> Tensor:
        """(R, ...) entries of the last complete chunks: masks (None), or keys or values of a layer.

        Args:
            like: (N, ...) entries of new chunks.
        """
        kept = self._kept.get(layer)
        if kept is None or (len(like) and kept.shape[1:] != like.shape[1:]):
            kept = self._kept[layer] = like.new_zeros(self.num_rows, *like.shape[1:])
        return kept

    def _all(self) -> list[Tensor]:
        return [*self._kept.values(), *([] if self._states is None else [self._states])]

    def move(self, source: int, target: int) -> None:
        super().move(source, target)
        self._tokens[target] = self._tokens[source]
        for tensor in self._all():
            tensor[target] = tensor[source]

    def reorder(self, sources: Sequence[int]) -> None:
        super().reorder(sources)
        rows, chosen = len(sources), [*sources]
        self._tokens[:rows] = [self._tokens[source] for source in sources]
        for tensor in self._all():
            tensor[:rows] = tensor[chosen]

    def clear(self, row: int) -> None:
        super().clear(row)
        self._tokens[row] = np.zeros(0, np.int64)
        for tensor in self._all():
            tensor[row] = 0
