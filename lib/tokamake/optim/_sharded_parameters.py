"""Whole parameters, for optimizers whose update needs more than this rank's part.

Optimizers see local parts; `WholeParameters` sums their values over all parts, or brings a whole
tensor to one rank that computes with it. Parameters may be divided along any dimensions. A
`ParameterShard` describes the part of this rank; for DTensors, `part_of` derives it.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from tokamake.runtime.torch_internals import group_timeout, local_shape_and_offset


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
    """Sums over whole parameters. Methods are collectives of all ranks that hold parts."""

    def __init__(self, part: Callable[[Tensor], ParameterShard] = part_of) -> None:
        self._part = part
        self._joined: dict[tuple[dist.ProcessGroup, ...], dist.ProcessGroup] = {}
        self._known_places: dict[tuple[int, ...], list[list[tuple[Any, ...]]]] = {}

    def shape(self, parameter: Tensor) -> tuple[int, ...]:
        return self._part(parameter).shape

    def num_parts(self, parameter: Tensor) -> int:
        """Number of ranks that divide a parameter."""
        return math.prod(map(self.size, self._part(parameter).groups))

    def sum(self, parameters: Sequence[Tensor], values: Sequence[Tensor]) -> list[Tensor]:
        """Sum a tensor per parameter over all parts; its shape is the same on all ranks.

        Parameters with the same groups share a collective.
        """
        sums = list(values)
        for groups, numbers in self._by_groups(parameters).items():
            if groups:
                flat = torch.cat([values[number].flatten() for number in numbers])
                for group in groups:
                    self.add_up(flat, group)
                pieces = flat.split([values[number].numel() for number in numbers])
                for number, piece in zip(numbers, pieces, strict=True):
                    sums[number] = piece.view(values[number].shape)
        return sums

    def _by_groups(
        self, parameters: Sequence[Tensor]
    ) -> dict[tuple[dist.ProcessGroup, ...], list[int]]:
        """Numbers of the parameters that the same groups divide."""
        numbers: dict[tuple[dist.ProcessGroup, ...], list[int]] = {}
        for number, parameter in enumerate(parameters):
            numbers.setdefault(self._part(parameter).groups, []).append(number)
        return numbers

    def on_owners(
        self,
        parameters: Sequence[Tensor],
        parts: Sequence[Tensor],
        *,
        function: Callable[[Tensor], Tensor],
    ) -> list[Tensor]:
        """Apply a function of whole tensors to a tensor per parameter; return local parts.

        Each whole tensor has one owner among the ranks that hold its parts. Ranks send their parts
        to the owners, and owners send back the parts of the results. So R ranks together send each
        tensor twice, less the parts of the owners, and each computes its share of the functions.

        Args:
            parts: a tensor for each of them, in the shape of the local part and of one dtype.
            function: keeps the shape and the dtype.
        """
        results = list(parts)
        for groups, numbers in self._by_groups(parameters).items():
            own = [parameters[number] for number in numbers]
            values = [parts[number] for number in numbers]
            if groups:
                values = self._exchanged(own, values, function=function, groups=groups)
            else:
                values = [*map(function, values)]
            for number, result in zip(numbers, values, strict=True):
                results[number] = result
        return results

    def _exchanged(
        self,
        parameters: list[Tensor],
        parts: list[Tensor],
        *,
        function: Callable[[Tensor], Tensor],
        groups: tuple[dist.ProcessGroup, ...],
    ) -> list[Tensor]:
        """`on_owners` for parameters that the same groups divide."""
        group = self._holders(groups)
        rank, size = self.rank(group), self.size(group)
        shapes = [self.shape(parameter) for parameter in parameters]
        places = self._places(parameters, group)
        owned = _owned(shapes, size)
        own = owned[rank]

        received = self.exchange(
            [_joined(parts, numbers, like=parts[0]) for numbers in owned],
            [sum(_size(places[source][n], shapes[n]) for n in own) for source in range(size)],
            group,
        )
        wholes = {number: parts[0].new_empty(shapes[number]) for number in own}
        for source, flat in enumerate(received):
            for number, piece in _pieces(flat, own, places[source], shapes).items():
                wholes[number][places[source][number]] = piece

        computed = {number: function(whole) for number, whole in wholes.items()}
        back = [
            [computed[number][places[target][number]] for number in own] for target in range(size)
        ]
        returned = self.exchange(
            [_joined(pieces, range(len(pieces)), like=parts[0]) for pieces in back],
            [sum(parts[number].numel() for number in numbers) for numbers in owned],
            group,
        )
        results = list(parts)
        for numbers, flat in zip(owned, returned, strict=True):
            for number, piece in _pieces(flat, numbers, places[rank], shapes).items():
                results[number] = piece
        return results

    def _holders(self, groups: tuple[dist.ProcessGroup, ...]) -> dist.ProcessGroup:
        """The ranks of all groups as one group, which the first call makes."""
        if len(groups) == 1:
            return groups[0]
        if groups not in self._joined:
            ranks = [dist.get_rank()]
            for group in groups:
                ranks = list(itertools.chain(*self.all_gather_object(ranks, group)))
            # Other pipeline stages and replicas do not wait.
            joined = dist.new_group(
                sorted(ranks), timeout=group_timeout(groups[0]), use_local_synchronization=True
            )
            assert joined is not None
            self._joined[groups] = joined
        return self._joined[groups]

    def _places(
        self, parameters: list[Tensor], group: dist.ProcessGroup
    ) -> list[list[tuple[Any, ...]]]:
        """Place of each rank's part of each parameter; asked for once."""
        key = id(group), *map(id, parameters)
        if key not in self._known_places:
            own = [self._part(parameter).place for parameter in parameters]
            self._known_places[key] = self.all_gather_object(own, group)
        return self._known_places[key]

    # ---- Collectives: tests replace them ----

    def rank(self, group: dist.ProcessGroup) -> int:
        return dist.get_rank(group)

    def size(self, group: dist.ProcessGroup) -> int:
        return dist.get_world_size(group)

    def add_up(self, values: Tensor, group: dist.ProcessGroup) -> None:
        """Sum values over the ranks of a group, in place."""
        dist.all_reduce(values, group=group)

    def all_gather_object(self, value: Any, group: dist.ProcessGroup) -> list[Any]:
        values: list[Any] = [None] * self.size(group)
        dist.all_gather_object(values, value, group=group)
        return values

    def exchange(
        self, sent: list[Tensor], sizes: list[int], group: dist.ProcessGroup
    ) -> list[Tensor]:
        """Send a flat tensor to each rank of a group; receive one of each of the `sizes`."""
        received = sent[0].new_empty(sum(sizes))
        dist.all_to_all_single(
            received, torch.cat(sent), sizes, [len(each) for each in sent], group=group
        )
        return [*received.split(sizes)]

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


def _owned(shapes: Sequence[tuple[int, ...]], size: int) -> list[list[int]]:
    """Numbers of the tensors that each rank owns: the largest first, to the rank with the least."""
    owned: list[list[int]] = [[] for _ in range(size)]
    loads = [0] * size
    for number in sorted(range(len(shapes)), key=lambda number: -math.prod(shapes[number])):
        owner = loads.index(min(loads))
        owned[owner].append(number)
        loads[owner] += math.prod(shapes[number])
    return owned


def _sizes(place: tuple[Any, ...], shape: tuple[int, ...]) -> list[int]:
    return [len(range(*each.indices(size))) for each, size in zip(place, shape, strict=True)]


def _size(place: tuple[Any, ...], shape: tuple[int, ...]) -> int:
    return math.prod(_sizes(place, shape))


def _joined(parts: Sequence[Tensor], numbers: Iterable[int], *, like: Tensor) -> Tensor:
    """Some parts, flat, one after the other."""
    return torch.cat([like.new_empty(0), *(parts[number].flatten() for number in numbers)])


def _pieces(
    flat: Tensor,
    numbers: Sequence[int],
    places: Sequence[tuple[Any, ...]],
    shapes: Sequence[tuple[int, ...]],
) -> dict[int, Tensor]:
    """Undo `_joined`: the part of each number, in its shape."""
    sizes = [_sizes(places[number], shapes[number]) for number in numbers]
    split = flat.split([math.prod(each) for each in sizes])
    pieces = zip(numbers, split, sizes, strict=True)
    return {number: piece.view(shape) for number, piece, shape in pieces}


UNSHARDED = WholeParameters()
"""For parameters that this rank holds whole, and for DTensors."""
