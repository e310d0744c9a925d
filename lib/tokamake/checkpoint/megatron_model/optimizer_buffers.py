"""The flat buffers of Megatron-LM's distributed optimizer: where each parameter lies in them.

A buffer holds the parameters of a (virtual) pipeline stage on a tensor-parallel rank, last one
first, each from a multiple of 64 elements on. Megatron divides a buffer into buckets.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from tokamake.checkpoint.megatron_model.optimizer_states import state_chunks
from tokamake.checkpoint.megatron_model.tensor_parallel_slices import TensorSlice
from tokamake.checkpoint.tensors.extents import Chunk, cut

_ALIGNMENT = 64


class BufferedParameter(NamedTuple):
    """A parameter in a buffer or bucket."""

    tensor: TensorSlice
    start: int
    """Its first element in the buffer."""

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.tensor.shape)


def buffer_places(shapes: Sequence[tuple[int, ...]]) -> tuple[list[int], int]:
    """Return the first element of each parameter in a buffer of one bucket, and the buffer size.

    Shapes have the order in which Megatron makes the parameters.
    """
    starts, end = list[int](), 0
    for shape in reversed(shapes):
        starts.append(_aligned(end))
        end = starts[-1] + math.prod(shape)
    return starts[::-1], end


def _aligned(place: int) -> int:
    return -(-place // _ALIGNMENT) * _ALIGNMENT


def fill_buckets(
    tensors: Iterable[TensorSlice], sizes: Sequence[int]
) -> list[list[BufferedParameter]]:
    """Return the parameters of each bucket.

    `tensors` have the order in which Megatron makes them; `sizes` are without the padding after a
    bucket's last parameter. Raises ValueError if the parameters do not fill buckets of these sizes.
    """
    remaining = [*tensors]
    buckets = []
    for size in sizes:
        bucket, end = list[BufferedParameter](), 0
        while remaining and end < size:
            parameter = BufferedParameter(remaining.pop(), _aligned(end))
            bucket.append(parameter)
            end = parameter.stop
        if end != size:
            raise ValueError(f"a bucket of {size:,} elements, not {end:,}")
        buckets.append(bucket)
    if remaining:
        raise ValueError(f"{len(remaining)} parameters in no bucket")
    return buckets


def range_chunks(
    parameters: Iterable[BufferedParameter], start: int, *, stop: int, prefix: str
) -> Iterator[Chunk]:
    """Yield the chunks of whole states that a range of a buffer holds, without padding."""
    for parameter in parameters:
        low, high = max(start, parameter.start), min(stop, parameter.stop)
        if low < high and not parameter.tensor.is_replica:
            chunks = state_chunks(parameter.tensor.chunks, prefix)
            first = parameter.start
            for chunk in cut(chunks, low - first, high - first):
                yield chunk._replace(start=chunk.start + low - start)
