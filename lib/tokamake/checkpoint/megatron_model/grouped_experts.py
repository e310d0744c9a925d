"""Experts of a layer in two matrices, as megatron.core's GroupedMLP has them.

`weight1` (D, E × outputs) and `weight2` (E × inputs, D) hold the transposed matrices of a rank's
experts, one after the other.
"""

import re
from collections import defaultdict
from typing import Any

from tokamake.checkpoint.megatron_model import module_tree
from tokamake.checkpoint.megatron_model.tensor_parallel_slices import TensorSlice
from tokamake.checkpoint.tensors.extents import Chunk

_EXPERT = re.compile(r"(.*\.experts)\.local_experts\.(\d+)\.linear_fc([12])\.weight")


def as_in_file(tree: Any, module: Any) -> Any:
    """Return the tree of a stage with the experts' tensors as a file has them."""
    is_joined = any(name.endswith(".experts.weight1") for name in module_tree.current_names(module))
    return joined(tree) if is_joined else tree


def joined(tree: Any) -> dict[str, TensorSlice]:
    """Return the tensors of a stage by their dotted names, with the experts of a layer in two."""
    plain: dict[str, TensorSlice] = {}
    members: dict[str, list[TensorSlice]] = defaultdict(list)
    for name, tensor in module_tree.named_slices(tree):
        if match := _EXPERT.fullmatch(name):
            members[f"{match[1]}.weight{match[3]}"].append(tensor)
        else:
            plain[name] = tensor
    return plain | {name: _joined(tensors, name[-1]) for name, tensors in members.items()}


def _joined(members: list[TensorSlice], number: str) -> TensorSlice:
    """The matrices of all experts in one."""
    first, size = members[0], len(members)
    outputs, inputs = first.shape
    chunks = tuple(
        _transposed(chunk, first.shape)._replace(
            start=place * outputs * inputs + chunk.start // inputs
        )
        for place, tensor in enumerate(members)
        for chunk in tensor.chunks
    )
    shape = (inputs, size * outputs) if number == "1" else (size * inputs, outputs)
    return first._replace(shape=shape, chunks=chunks)


def _transposed(chunk: Chunk, shape: tuple[int, ...]) -> Chunk:
    """A chunk of whole rows of a matrix, as it lies in the transposed matrix."""
    outputs, _ = shape
    stacks = (1,) * (len(chunk.slices) - 2)
    return chunk._replace(stride=(*stacks, 1, outputs))
