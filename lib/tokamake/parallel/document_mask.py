"""Masks of attention that keep the documents of a sequence apart, on one rank or several.

The model passes document ids to `document_mask`, and the mask to `attention`.
Shape suffixes: B batch, L tokens of a rank (in `ids_BNL` of a chunk), N chunks of all ranks.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from tokamake.parallel.axis import Axis
from tokamake.parallel.context import Method, in_order
from tokamake.runtime.device import copied_to

Relation = Literal["apart", "same", "mixed"]
"""apart: two chunks have no document in common; same: both are of one document; mixed: neither."""


@dataclass(frozen=True)
class Documents:
    """Documents of samples that several ranks share, for "ring"."""

    ids_BNL: Tensor
    """Document id of each token, integers; the chunks of all ranks in the order of tokens."""
    relations: list[list[Relation]]
    """[chunk of queries][chunk of keys], over all samples of the batch."""

    @classmethod
    def of(cls, ids_BNL: Tensor) -> "Documents":
        """Compare chunks; call it once for all layers, because it waits for the device."""
        return cls(ids_BNL, _relations(ids_BNL.amin(2), ids_BNL.amax(2)))

    def in_same_document(self, query: int, key: int) -> Tensor:
        """(B, L, L) bool of two chunks: whether a query and a key are of one document."""
        return self.ids_BNL[:, query, :, None] == self.ids_BNL[:, key, None]


def _relations(low_BN: Any, high_BN: Any) -> list[list[Relation]]:
    """Relations of chunks by their smallest and largest ids: tensors or arrays.

    They prove that chunks are apart or the same; the rest is mixed, and gets a bias.
    """
    apart_BNN = low_BN[:, :, None] > high_BN[:, None]
    apart_NN = (apart_BNN | apart_BNN.swapaxes(1, 2)).all(0)
    single_BNN = (low_BN[:, :, None] == high_BN[:, None]) & (low_BN == high_BN)[:, None]
    same_NN = (single_BNN & single_BNN.swapaxes(1, 2)).all(0)
    names: tuple[Relation, ...] = ("mixed", "same", "apart")
    codes: list[list[int]] = (same_NN + 2 * apart_NN).tolist()
    return [[names[code] for code in row] for row in codes]


def positions_in_documents(ids_BL: Tensor) -> Tensor:
    """Positions of tokens in their documents, (B, L) int64; ids of a document are consecutive."""
    places_BL = torch.arange(ids_BL.shape[1], device=ids_BL.device).expand_as(ids_BL)
    begins_BL = ids_BL[:, 1:] != ids_BL[:, :-1]
    firsts_BL = F.pad(begins_BL, (1, 0), value=True) * places_BL
    return places_BL - firsts_BL.cummax(1).values


class Unmasked:
    """Mask of attention in both directions: each token attends to all tokens of its sequence."""


UNMASKED = Unmasked()


def keep_ids(ids_BL: Tensor, array_BL: npt.NDArray[Any]) -> None:
    """Keep ids of documents in host memory, beside those on a device.

    Masks of this very tensor then need not wait for the device.

    Args:
        array_BL: the same ids; whole sequences, even if ranks share them.
    """
    setattr(ids_BL, _IDS, array_BL)


def kept_ids(ids_BL: Tensor) -> npt.NDArray[Any] | None:
    """Ids that `keep_ids` has kept."""
    array_BL: npt.NDArray[Any] | None = getattr(ids_BL, _IDS, None)
    return array_BL


def keep_host_ids(_: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Hook of torch before a forward pass: keep ids that are further keyword arguments.

    A pipeline divides the tensors of a step into micro batches, and the parts have no kept ids. So
    it gets the ids as tensors in host memory, too. Their names begin with `ON_HOST`.
    """
    others = {name: value for name, value in kwargs.items() if not name.startswith(ON_HOST)}
    for name in kwargs.keys() - others.keys():
        keep_ids(others[name.removeprefix(ON_HOST)], kwargs[name].numpy())
    return args, others


ON_HOST = "on_host_"
"""Prefix of the names of keyword arguments in host memory."""
_IDS = "ids_of_documents"
"""Attribute of a tensor of ids."""


def _bounds(ids_BL: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    begins_BL = np.ones(ids_BL.shape, bool)
    begins_BL[:, 1:] = ids_BL[:, 1:] != ids_BL[:, :-1]
    return np.append(np.flatnonzero(begins_BL), begins_BL.size).astype(np.int32)


class PackedDocuments:
    """Documents of samples whose tokens are all on this rank, in the forms that kernels take.

    Attributes:
        causal: whether a token attends only to itself and earlier tokens of its document.
    """

    def __init__(self, ids_BL: Tensor, *, causal: bool = True) -> None:
        self._ids_BL, self.causal = ids_BL, causal
        array_BL = kept_ids(ids_BL)
        self._host_bounds = None if array_BL is None else _bounds(array_BL)

    @cached_property
    def bounds(self) -> Tensor:
        """First token of each document, and the end of the last, in the flattened batch; int32."""
        if self._host_bounds is not None:
            return copied_to(torch.from_numpy(self._host_bounds), self._ids_BL.device)
        begins_BL = torch.ones_like(self._ids_BL, dtype=torch.bool)
        begins_BL[:, 1:] = self._ids_BL[:, 1:] != self._ids_BL[:, :-1]
        begins = begins_BL.flatten().nonzero()[:, 0]
        return F.pad(begins, (0, 1), value=begins_BL.numel()).int()

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each document. Without `keep_ids`, the first access waits for the device,
        once for all layers."""
        if self._host_bounds is not None:
            return [*map(int, np.diff(self._host_bounds))]
        lengths: list[int] = self.bounds.diff().tolist()
        return lengths

    @cached_property
    def mask(self) -> Tensor:
        """(B, 1, L, L) bool: whether a query attends to a key: same document, and not later."""
        length = self._ids_BL.shape[1]
        same_BLL = self._ids_BL[:, :, None] == self._ids_BL[:, None, :]
        if self.causal:  # else later ones, too
            same_BLL = same_BLL & same_BLL.new_ones(length, length).tril()
        return same_BLL[:, None]


def document_mask(
    ids_BL: Tensor, *, axis: Axis, method: Method, causal: bool = True
) -> PackedDocuments | Documents:
    """Make the mask with which `attention` keeps each document separate.

    This is a collective: all ranks of the axis call it, once per forward pass.

    Args:
        ids_BL: (B, L) integers, the document id of each token of this rank's `share`.
        causal: whether a token attends only to itself and earlier tokens of its document; several
            ranks support nothing else.
    """
    if axis.size == 1:
        return PackedDocuments(ids_BL, causal=causal)
    assert causal, "context-parallel ranks compute causal attention only"
    if (array_BL := kept_ids(ids_BL)) is not None:
        return _of_sequence(array_BL, axis=axis, method=method, device=ids_BL.device)
    shares = [torch.empty_like(ids_BL) for _ in range(axis.size)]
    axis.sends(ids_BL)
    dist.all_gather(shares, ids_BL.contiguous(), group=axis.group)
    for ids in shares:
        axis.received(ids)
    ids_BNL = in_order(torch.stack(shares, 1).unflatten(2, (2, -1)), 1)
    return Documents.of(ids_BNL) if method == "ring" else PackedDocuments(ids_BNL.flatten(1))


def _of_sequence(
    array_BL: npt.NDArray[Any], *, axis: Axis, method: Method, device: torch.device
) -> PackedDocuments | Documents:
    """The mask of sequences whose ids this rank has on the host: no peer and no device waits."""
    ids_BL = copied_to(torch.from_numpy(np.ascontiguousarray(array_BL)), device)
    if method != "ring":
        keep_ids(ids_BL, array_BL)
        return PackedDocuments(ids_BL)
    chunks_BNL = array_BL.reshape(len(array_BL), 2 * axis.size, -1)
    relations = _relations(chunks_BNL.min(2), chunks_BNL.max(2))
    return Documents(ids_BL.view(chunks_BNL.shape), relations)
