"""Runs of elements of flattened tensors as chunks of the whole tensors."""

import math
from collections.abc import Iterable, Iterator, Sequence

from tokamake.checkpoint.tensors.extents import Chunk

Box = tuple[slice, ...]


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Boxes that make up a run of a flattened tensor, in its order.

    Args:
        shape: of the tensor.
        start: first element of the run.
        stop: the one after the last.

    Yields:
        No more than twice as many as dimensions.
    """
    if start == stop:
        return
    if len(shape) < 2:
        # Without dimensions there is one element, and one box.
        yield tuple(slice(start, stop) for _ in shape)
        return
    row = math.prod(shape[1:])
    first, before = divmod(start, row)
    if before or stop - start < row:
        # The rest of a row, then what comes after it.
        end = min(stop, (first + 1) * row)
        for box in boxes(shape[1:], before, end - first * row):
            yield (slice(first, first + 1), *box)
        yield from boxes(shape, end, stop)
        return
    last = stop // row
    yield (slice(first, last), *(slice(0, size) for size in shape[1:]))
    yield from boxes(shape, last * row, stop)


def cut(blocks: Iterable[Chunk], start: int, stop: int) -> Iterator[Chunk]:
    """What a run of a stored tensor is made of.

    Args:
        blocks: of the stored tensor; row after row, without gaps.
        start: first element of the run.
        stop: the one after the last.

    Yields:
        Blocks that count elements from the begin of the run.
    """
    for block in blocks:
        assert block.stride is None, "what is cut lies row after row"
        size = block.size
        low, high = max(start, block.start), min(stop, block.start + math.prod(size))
        at = low - start
        for box in boxes(size, low - block.start, max(low, high) - block.start):
            yield block._replace(place=_within(block.place, box), start=at)
            at += math.prod(each.stop - each.start for each in box)


def _within(place: Box, box: Box) -> Box:
    pairs = zip(place, box, strict=True)
    return tuple(slice(at.start + own.start, at.start + own.stop) for at, own in pairs)
