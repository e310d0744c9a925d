"""Parts of a tensor in a flat buffer, as torch's distributed checkpoint writes and reads them.

A back end that cuts parameters anywhere, as DeepSpeed does, says which run of elements it holds; it
becomes a few boxes of the whole tensor.
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

Offset = tuple[int, ...]


class FlatChunks(Tensor):
    """Some boxes of a whole tensor; itself without data, it has the whole one's shape.

    The three methods with underscores are what torch.distributed.checkpoint asks a tensor for.

    Args:
        shape: of the whole tensor.
        dtype: of its elements.
        boxes: views of this rank's parts by their place in the whole.
    """

    boxes: Mapping[Offset, Tensor]

    @staticmethod
    def __new__(
        cls, shape: Sequence[int], dtype: torch.dtype, boxes: Mapping[Offset, Tensor]
    ) -> "FlatChunks":
        """Make it without memory of its own."""
        made: FlatChunks = Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype)
        made.boxes = boxes
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Shape and places."""
        return f"Fragments({list(self.shape)}, {[*self.boxes]})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, arguments: Any, options: Any = None
    ) -> Any:
        """Refuse to compute: of all operators, only what a copy begins with is there."""
        if function is torch.ops.aten.new_empty.default:
            return FlatChunks(arguments[1], arguments[0].dtype, {})
        raise RuntimeError(f"{function}: a tensor in fragments is for checkpoints only")

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
    """A tensor, which may be empty, as one box of a whole one.

    Args:
        tensor: without gradient.
        shape: of the whole tensor.
        place: index of the box in it.
    """
    offset = tuple(at.start for at in place)
    return FlatChunks(shape, tensor.dtype, {offset: tensor} if tensor.numel() else {})


def boxes(run: Tensor, start: int, place: Sequence[slice]) -> dict[Offset, Tensor]:
    """Boxes of a whole tensor that are a run of elements of its flattened part.

    Args:
        run: the elements, one after the other.
        start: how many of the part's elements go before.
        place: index of the part in the whole tensor.

    Returns:
        Views of `run` by their place in the whole tensor; no more than twice as many as dimensions.
    """
    found, first = {}, 0
    for place_in_part in flat_runs.boxes(
        [at.stop - at.start for at in place], start, start + len(run)
    ):
        size = [at.stop - at.start for at in place_in_part]
        pairs = zip(place_in_part, place, strict=True)
        offset = tuple(own.start + at.start for own, at in pairs)
        found[offset] = run[first : first + math.prod(size)].view(size)
        first += math.prod(size)
    return found
