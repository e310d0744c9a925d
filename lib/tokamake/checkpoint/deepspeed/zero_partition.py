"""ZeRO's partitions of flattened tensors over data-parallel ranks."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple


class FlatRange(NamedTuple):
    """A range of elements of a tensor that lies in a larger flat tensor."""

    name: str
    start: int
    """First element of the tensor in the range."""
    stop: int
    offset: int
    """Element of the flat tensor where the range begins."""


def partition_ranges(
    sizes: Sequence[tuple[str, int]], start: int, *, stop: int
) -> Iterator[FlatRange]:
    """Yield the ranges of concatenated tensors that lie in a partition, as in ZeRO 1 and 2.

    Args:
        sizes: name and number of elements of each tensor.
        stop: element after the last. It may lie in the padding after the tensors.
    """
    ends = accumulate(size for _, size in sizes)
    for (name, size), end in zip(sizes, ends, strict=True):
        begin = end - size
        low, high = max(start, begin), min(stop, end)
        if low < high:
            yield FlatRange(name, low - begin, high - begin, low - start)


def slice_size(size: int, num_ranks: int) -> int:
    """Return the number of elements of a tensor on each rank in ZeRO 3; the last has padding."""
    return -(-size // num_ranks)


def slice_range(name: str, size: int, *, rank: int, num_ranks: int, offset: int) -> FlatRange:
    """Return the range of a tensor on a rank in ZeRO 3; it is empty if earlier ranks hold it all.

    Args:
        size: its number of elements.
        offset: element of the rank's flat tensor where the slice begins.
    """
    start, stop = (min(size, number * slice_size(size, num_ranks)) for number in (rank, rank + 1))
    return FlatRange(name, start, stop, offset)
