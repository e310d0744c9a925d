"""Tensors in pieces of a flat buffer, for torch's distributed checkpoint (DCP).

DeepSpeed partitions flattened parameters at any element. A rank's run of elements becomes a few
boxes of the whole tensor, which DCP writes and reads as chunks.
"""

import math
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

from tokamake.checkpoint.tensors import flat_runs
from tokamake.runtime.torch_internals import wrapper_subclass

Offset = tuple[int, ...]


class FlatChunks(Tensor):
    """Some boxes of a whole tensor. It has the shape of the whole tensor, but no data of its own.

    The three methods with double underscores are DCP's interface for sharded tensors.

    Args:
        shape: of the whole tensor.
        dtype: of its elements.
        boxes: this rank's boxes, by their offset in the whole tensor.
    """

    boxes: Mapping[Offset, Tensor]

    @staticmethod
    def __new__(
        cls, shape: Sequence[int], dtype: torch.dtype, boxes: Mapping[Offset, Tensor]
    ) -> "FlatChunks":
        wrapper: FlatChunks = wrapper_subclass(cls, shape, dtype)
        wrapper.boxes = boxes
        return wrapper

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"FlatChunks({list(self.shape)}, {[*self.boxes]})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, arguments: Any, options: Any = None
    ) -> Any:
        # DCP's staging copies a tensor with new_empty and copies its boxes itself.
        if function is torch.ops.aten.new_empty.default:
            return FlatChunks(arguments[1], arguments[0].dtype, {})
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
            ChunkStorageMetadata(torch.Size(offset), box.shape)
            for offset, box in self.boxes.items()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.boxes[tuple(index.offset)]


def box(tensor: Tensor, shape: Sequence[int], place: Sequence[slice]) -> FlatChunks:
    """Wrap a tensor as one box of a whole tensor; an empty tensor gives no box.

    Args:
        tensor: without gradient.
        shape: of the whole tensor.
        place: of the box.
    """
    offset = tuple(at.start for at in place)
    return FlatChunks(shape, tensor.dtype, {offset: tensor} if tensor.numel() else {})


def boxes(run: Tensor, start: int, place: Sequence[slice]) -> dict[Offset, Tensor]:
    """Split a run of elements of a flattened part of a tensor into boxes of the whole tensor.

    Args:
        run: the elements, flat.
        start: first element of the run in the flattened part.
        place: of the part in the whole tensor.

    Returns:
        Views of `run` by their offset in the whole tensor, at most two a dimension.
    """
    views, position = {}, 0
    part_shape = [at.stop - at.start for at in place]
    for box in flat_runs.boxes(part_shape, start, start + len(run)):
        size = [at.stop - at.start for at in box]
        offset = tuple(at.start + origin.start for at, origin in zip(box, place, strict=True))
        num_elements = math.prod(size)
        views[offset] = run[position : position + num_elements].view(size)
        position += num_elements
    return views
