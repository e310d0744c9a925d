"""Tensors as chunks of a flat buffer, for torch's distributed checkpoint (DCP).

DeepSpeed partitions flattened parameters at any element. A rank's range of elements becomes a
few chunks of the whole tensor, which DCP writes and reads.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from tokamake.checkpoint.tensors.extents import Chunk, cut
from tokamake.runtime.torch_internals import wrapper_subclass

Offset = tuple[int, ...]


class FlatChunks(Tensor):
    """This rank's chunks of a whole tensor, by offset; the tensor itself has a shape but no data.

    The three methods with double underscores are DCP's interface for sharded tensors.
    """

    chunks: Mapping[Offset, Tensor]

    @staticmethod
    def __new__(
        cls, shape: Sequence[int], *, dtype: torch.dtype, chunks: Mapping[Offset, Tensor]
    ) -> "FlatChunks":
        wrapper: FlatChunks = wrapper_subclass(cls, shape, dtype=dtype)
        wrapper.chunks = chunks
        return wrapper

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"FlatChunks({list(self.shape)}, {[*self.chunks]})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, arguments: Any, options: Any = None
    ) -> Any:
        # DCP's staging copies a tensor with new_empty and copies its chunks itself.
        if function is torch.ops.aten.new_empty.default:
            return FlatChunks(arguments[1], dtype=arguments[0].dtype, chunks={})
        raise RuntimeError(f"{function}: FlatChunks are for checkpoints only")

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(offset), chunk.shape)
            for offset, chunk in self.chunks.items()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.chunks[tuple(index.offset)]


def single_chunk(tensor: Tensor, shape: Sequence[int], *, place: Sequence[slice]) -> FlatChunks:
    """Wrap a tensor as the only chunk of a whole tensor; an empty tensor gives no chunk."""
    offset = tuple(at.start for at in place)
    return FlatChunks(shape, dtype=tensor.dtype, chunks={offset: tensor} if tensor.numel() else {})


def chunks_of_range(
    elements: Tensor, start: int, *, place: Sequence[slice]
) -> dict[Offset, Tensor]:
    """Split a range of a flattened slice of a tensor, from element `start` on, into views.

    Their keys are offsets in the whole tensor; there are at most two views a dimension.
    """
    return {
        tuple(at.start for at in chunk.slices): elements[chunk.start : chunk.stop].view(chunk.size)
        for chunk in cut([Chunk("", tuple(place))], start, start + len(elements))
    }
