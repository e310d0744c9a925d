"""Whole parameters, for optimizers whose update needs more than this rank's part.

Optimizers see local parts; `WholeParameters` sums their values over all parts. Parameters may be
divided along any dimensions. A `ParameterShard` describes the part of this rank; for DTensors,
`part_of` derives it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from tokamake.runtime.torch_internals import local_shape_and_offset


@dataclass(frozen=True)
class ParameterShard:
    """The part of a parameter that this rank holds."""

    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    place: tuple[Any, ...]
    """Index of the part, such as a slice per dimension: `whole[place]` is the part."""
    groups: tuple[dist.ProcessGroup, ...] = ()
    """Groups that divide the parameter. Sums over all of them, one after the other, count each
    part once; groups that replicate the parameter are excluded."""


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, which shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def part_of(parameter: Tensor) -> ParameterShard:
    """The part described by a DTensor's placements; for a plain tensor, all of it."""
    if not isinstance(parameter, DTensor):
        return ParameterShard(
            tuple(parameter.shape), tuple(slice(0, size) for size in parameter.shape)
        )
    mesh, placements = parameter.device_mesh, parameter.placements
    sizes, offsets = local_shape_and_offset(parameter.shape, mesh, placements=placements)
    sharded = [dim for dim, placement in enumerate(placements) if isinstance(placement, Shard)]
    return ParameterShard(
        tuple(parameter.shape),
        tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True)),
        tuple(mesh.get_group(dim) for dim in sharded),
    )


class WholeParameters:
    """Sums over whole parameters. Methods are collectives of all ranks that hold parts.

    Args:
        part: function from a parameter of the optimizer to the part that this rank holds.
    """

    def __init__(self, part: Callable[[Tensor], ParameterShard] = part_of) -> None:
        self._part = part

    def shape(self, parameter: Tensor) -> tuple[int, ...]:
        """Shape of the whole parameter."""
        return self._part(parameter).shape

    def sum(self, parameters: Sequence[Tensor], values: Sequence[Tensor]) -> list[Tensor]:
        """Sum a tensor per parameter over all parts; its shape is the same on all ranks.

        Parameters with the same groups share a collective.
        """
        sums = list(values)
        by_groups: dict[tuple[dist.ProcessGroup, ...], list[int]] = {}
        for number, parameter in enumerate(parameters):
            by_groups.setdefault(self._part(parameter).groups, []).append(number)
        for groups, numbers in by_groups.items():
            if groups:
                flat = torch.cat([values[number].flatten() for number in numbers])
                for group in groups:
                    dist.all_reduce(flat, group=group)
                pieces = flat.split([values[number].numel() for number in numbers])
                for number, piece in zip(numbers, pieces, strict=True):
                    sums[number] = piece.view(values[number].shape)
        return sums

    def gather(self, parameters: Sequence[Tensor], parts: Sequence[Tensor]) -> list[Tensor]:
        """Gather a tensor per parameter, shaped like the local part, to the whole shape."""
        placed = [
            self._placed(parameter, part) if self._part(parameter).groups else part
            for parameter, part in zip(parameters, parts, strict=True)
        ]
        return self.sum(parameters, placed)

    def _placed(self, parameter: Tensor, part: Tensor) -> Tensor:
        whole = part.new_zeros(self.shape(parameter))
        whole[self._part(parameter).place] = part
        return whole

    def along(self, parameter: Tensor, sums: Tensor, *, dim: int) -> Tensor:
        """Place sums of the local part along `dim` (of size 1) in zeros of the whole's shape.

        `sum` of the results of all ranks gives the sums of the whole parameter along `dim`.
        """
        shape, place = list(self.shape(parameter)), list(self._part(parameter).place)
        shape[dim], place[dim] = 1, slice(0, 1)
        placed = sums.new_zeros(shape)
        placed[tuple(place)] = sums
        return placed

    def part(self, parameter: Tensor, whole: Tensor) -> Tensor:
        """Take the local part of a tensor of the whole shape, in which dimensions may be 1."""
        place = self._part(parameter).place
        sizes = zip(place, whole.shape, self.shape(parameter), strict=True)
        # Sums along a dimension have size 1 there.
        index = tuple(slice(0, 1) if size != full else each for each, size, full in sizes)
        return whole[index]


UNSHARDED = WholeParameters()
"""For parameters that this rank holds whole, and for DTensors."""
