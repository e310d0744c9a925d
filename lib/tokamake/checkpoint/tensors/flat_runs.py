"""Runs of elements of a flattened tensor, as chunks of the whole tensor."""

import math
from collections.abc import Iterable, Iterator, Sequence

from tokamake.checkpoint.tensors.extents import Box, Chunk, whole_box


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Split a run of a flattened tensor into boxes, in order.

    Args:
        shape: of the tensor.
        start: first element of the run.
        stop: element after the last one.

    Yields:
        At most two boxes a dimension.
    """
    if start == stop:
        return
    if len(shape) < 2:
        # A tensor without dimensions has one element, and one box without slices.
        yield tuple(slice(start, stop) for _ in shape)
        return
    row = math.prod(shape[1:])
    first, before = divmod(start, row)
    if before or stop - start < row:
        # The run begins within a row: first the remainder of that row, then what follows.
        end = min(stop, (first + 1) * row)
        for box in boxes(shape[1:], before, end - first * row):
            yield (slice(first, first + 1), *box)
        yield from boxes(shape, end, stop)
        return
    last = stop // row
    yield (slice(first, last), *whole_box(shape[1:]))
    yield from boxes(shape, last * row, stop)


def cut(chunks: Iterable[Chunk], start: int, stop: int) -> Iterator[Chunk]:
    """Cut a run out of a stored tensor.

    Args:
        chunks: of the stored tensor, contiguous.
        start: first element of the run.
        stop: element after the last one.

    Yields:
        Chunks of the run; their `start` counts from the beginning of the run.
    """
    for chunk in chunks:
        assert chunk.stride is None, "a chunk that is cut is contiguous"
        size = chunk.size
        first = max(start, chunk.start)
        last = max(first, min(stop, chunk.start + math.prod(size)))
        position = first - start
        for box in boxes(size, first - chunk.start, last - chunk.start):
            yield chunk._replace(box=_shifted(box, chunk.box), start=position)
            position += math.prod(at.stop - at.start for at in box)


def _shifted(box: Box, origin: Box) -> Box:
    pairs = zip(origin, box, strict=True)
    return tuple(slice(at.start + own.start, at.start + own.stop) for at, own in pairs)
