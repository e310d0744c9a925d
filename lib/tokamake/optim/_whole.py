"""Parameters that several ranks hold parts of, for optimizers that need them whole.

Optimizers see local parts; a `WholeParameters` adds up what they find in theirs. Parts may be cut
along any dimensions. A `ParameterPart` says which part a rank holds; DTensors say so themselves.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard


@dataclass(frozen=True)
class ParameterPart:
    """Which part of a parameter this rank holds."""

    shape: tuple[int, ...]
    """Of the whole parameter."""
    place: tuple[Any, ...]
    """Index of the part in the whole, e.g. a slice per dimension: `whole[place]` is the part."""
    groups: tuple[dist.ProcessGroup, ...] = ()
    """Sums over these, one after the other, are sums over all parts, each counted once: groups
    along which the parameter is cut, but none along which it is replicated."""


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor; writing to it writes to the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def part_of(parameter: Tensor) -> ParameterPart:
    """The part that a DTensor's placements say; all of it for a plain tensor."""
    if not isinstance(parameter, DTensor):
        return ParameterPart(
            tuple(parameter.shape), tuple(slice(0, size) for size in parameter.shape)
        )
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = parameter.device_mesh, parameter.placements
    sizes, offsets = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    cut = [number for number, placement in enumerate(placements) if isinstance(placement, Shard)]
    return ParameterPart(
        tuple(parameter.shape),
        tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True)),
        tuple(mesh.get_group(number) for number in cut),
    )


class WholeParameters:
    """Sums over whole parameters; all ranks that hold parts must call alike.

    Args:
        part: which part of a parameter, as the optimizer was given it, this rank holds.
    """

    def __init__(self, part: Callable[[Tensor], ParameterPart] = part_of) -> None:
        self._part = part

    def shape(self, parameter: Tensor) -> tuple[int, ...]:
        """Shape of the whole parameter."""
        return self._part(parameter).shape

    def sum(self, parameters: Sequence[Tensor], values: Sequence[Tensor]) -> list[Tensor]:
        """Add up a tensor for each parameter, of equal shape on all ranks, over its parts.

        Parameters with the same groups share a collective.
        """
        found = list(values)
        together: dict[tuple[dist.ProcessGroup, ...], list[int]] = {}
        for number, parameter in enumerate(parameters):
            together.setdefault(self._part(parameter).groups, []).append(number)
        for groups, numbers in together.items():
            if groups:
                flat = torch.cat([values[number].flatten() for number in numbers])
                for group in groups:
                    dist.all_reduce(flat, group=group)
                pieces = flat.split([values[number].numel() for number in numbers])
                for number, piece in zip(numbers, pieces, strict=True):
                    found[number] = piece.view(values[number].shape)
        return found

    def gather(self, parameters: Sequence[Tensor], parts: Sequence[Tensor]) -> list[Tensor]:
        """Put a tensor for each parameter, shaped like its local part, together whole."""
        cut = [bool(self._part(parameter).groups) for parameter in parameters]
        placed = [
            self._placed(parameter, part) if apart else part
            for parameter, part, apart in zip(parameters, parts, cut, strict=True)
        ]
        return self.sum(parameters, placed)

    def _placed(self, parameter: Tensor, part: Tensor) -> Tensor:
        whole = part.new_zeros(self.shape(parameter))
        whole[self._part(parameter).place] = part
        return whole

    def along(self, parameter: Tensor, sums: Tensor, dim: int) -> Tensor:
        """Place sums of a local matrix along `dim`, kept at size 1, among those of the whole.

        What `sum` makes of the result on all ranks are the sums of the whole along `dim`.
        """
        shape, place = list(self.shape(parameter)), list(self._part(parameter).place)
        shape[dim], place[dim] = 1, slice(0, 1)
        placed = sums.new_zeros(shape)
        placed[tuple(place)] = sums
        return placed

    def part(self, parameter: Tensor, whole: Tensor) -> Tensor:
        """Take the local part of what is shaped like the parameter, or of size 1 somewhere."""
        place = self._part(parameter).place
        sizes = zip(place, whole.shape, self.shape(parameter), strict=True)
        # A row of sums has one element where the parameter has many.
        index = tuple(slice(0, 1) if size != full else each for each, size, full in sizes)
        return whole[index]


ALONE = WholeParameters()
"""Of parameters that this rank holds whole, and of DTensors."""
