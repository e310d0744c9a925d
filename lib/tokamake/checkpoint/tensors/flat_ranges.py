"""Ranges of elements of a flattened tensor, as chunks of the whole tensor."""

import math
from collections.abc import Iterable, Iterator, Sequence

from tokamake.checkpoint.tensors.extents import Chunk, Slices, whole_slices


def slices_of_range(shape: Sequence[int], start: int, *, stop: int) -> Iterator[Slices]:
    """Split a range of a flattened tensor into slices in order, at most two a dimension."""
    if start == stop:
        return
    if len(shape) < 2:
        # A tensor without dimensions has one element and no dimension to slice.
        yield tuple(slice(start, stop) for _ in shape)
        return
    row = math.prod(shape[1:])
    first, before = divmod(start, row)
    if before or stop - start < row:
        # The range begins within a row: first the remainder of that row, then what follows.
        end = min(stop, (first + 1) * row)
        for slices in slices_of_range(shape[1:], before, stop=end - first * row):
            yield (slice(first, first + 1), *slices)
        yield from slices_of_range(shape, end, stop=stop)
        return
    last = stop // row
    yield (slice(first, last), *whole_slices(shape[1:]))
    yield from slices_of_range(shape, last * row, stop=stop)


def cut(chunks: Iterable[Chunk], start: int, stop: int) -> Iterator[Chunk]:
    """Cut a range out of contiguous chunks; `start` of the results counts from the range."""
    for chunk in chunks:
        assert chunk.stride is None, "a chunk that is cut is contiguous"
        size = chunk.size
        first = max(start, chunk.start)
        last = max(first, min(stop, chunk.start + math.prod(size)))
        position = first - start
        for slices in slices_of_range(size, first - chunk.start, stop=last - chunk.start):
            yield chunk._replace(slices=_shifted(slices, chunk.slices), start=position)
            position += math.prod(at.stop - at.start for at in slices)


def _shifted(slices: Slices, origin: Slices) -> Slices:
    pairs = zip(origin, slices, strict=True)
    return tuple(slice(at.start + own.start, at.start + own.stop) for at, own in pairs)
