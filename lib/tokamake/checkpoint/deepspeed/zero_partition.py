"""How ZeRO partitions flattened tensors over data-parallel ranks."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple


class FlatRange(NamedTuple):
    """A run of one of several tensors that are laid one after the other."""

    name: str
    start: int
    """First element of the tensor in the run."""
    stop: int
    at: int
    """Where it begins in what holds the run."""


def partition(sizes: Sequence[tuple[str, int]], start: int, stop: int) -> Iterator[FlatRange]:
    """What a partition has of tensors that are laid one after the other, as ZeRO 1 and 2 do.

    Args:
        sizes: name and elements of each tensor.
        start: first element of the partition.
        stop: the one after the last; there may be padding at the end.
    """
    ends = accumulate(size for _, size in sizes)
    for (name, size), end in zip(sizes, ends, strict=True):
        begin = end - size
        low, high = max(start, begin), min(stop, end)
        if low < high:
            yield FlatRange(name, low - begin, high - begin, low - start)


def share(size: int, ranks: int) -> int:
    """Elements that ZeRO 3 keeps of a tensor on each rank; the last ones' are filled up."""
    return -(-size // ranks)


def slice_of(name: str, size: int, rank: int, ranks: int, at: int) -> FlatRange:
    """What a rank has of a tensor, as ZeRO 3 does: nothing, where the ranks before have it all.

    Args:
        name: of the tensor.
        size: its elements.
        rank: which has it.
        ranks: how many share the tensor.
        at: where it begins in what holds it.
    """
    start, stop = (min(size, number * share(size, ranks)) for number in (rank, rank + 1))
    return FlatRange(name, start, stop, at)
