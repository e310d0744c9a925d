"""This rank's fragment of each parameter under DeepSpeed: elements of a flat fp32 partition.

One interface for all ZeRO stages. The engine reads initial weights into the fragments, and writes
the fragments to checkpoints.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokamake.checkpoint.native import training_state
from tokamake.checkpoint.native.flat_chunks import FlatChunks, chunks_of_range
from tokamake.checkpoint.torch_files import dcp_metadata
from tokamake.errors import UserError
from tokamake.parallel.sharding import ParameterChunk
from tokamake.train.backends import _deepspeed_internals as internals


@dataclass(frozen=True)
class Fragment:
    """This rank's fragment of a parameter."""

    chunk: ParameterChunk
    """The parameter, after tensor and pipeline parallelism."""
    start: int
    """Offset of the fragment in the flattened parameter."""
    flat: Tensor
    """Buffer of weights, which is one parameter for the optimizer."""
    offset: int
    """Offset of the fragment in the buffer."""
    size: int
    """Number of elements of the fragment."""

    def of(self, tensor: Tensor) -> Tensor:
        """The fragment of the buffer, or of an optimizer state of the buffer's shape."""
        return tensor.detach().view(-1).narrow(0, self.offset, self.size)

    def place(self, tensor: Tensor) -> FlatChunks:
        """The fragment of such a tensor, as chunks of the whole parameter."""
        chunks = chunks_of_range(self.of(tensor), self.start, place=self.chunk.place)
        return FlatChunks(self.chunk.shape, dtype=tensor.dtype, chunks=chunks)


def fragments(chunks: Iterable[ParameterChunk], optimizer: Any, stage: int) -> list[Fragment]:
    """This rank's fragments of parameters, without empty ones."""
    return [
        fragment
        for parameter in chunks
        if (fragment := _fragment(parameter, optimizer, stage=stage)).size
    ]


def _fragment(chunk: ParameterChunk, optimizer: Any, *, stage: int) -> Fragment:
    if stage == 0:
        return Fragment(chunk, 0, chunk.local, 0, chunk.local.numel())
    return Fragment(chunk, *internals.partition(optimizer, chunk.parameter, stage))


def tensors_of(
    fragments: Iterable[Fragment], states: Mapping[Tensor, dict[str, Any]]
) -> training_state.Tensors:
    """This rank's weights and optimizer states (by `Fragment.flat`), by key in a checkpoint."""
    tensors: training_state.Tensors = {}
    for fragment in fragments:
        name = fragment.chunk.saved_name
        tensors[f"model.{name}"] = fragment.place(fragment.flat)
        for kind, value in states.get(fragment.flat, {}).items():
            like_buffer = value.shape == fragment.flat.shape
            # Other states, such as step counts, are the same for the whole buffer.
            tensor = fragment.place(value) if like_buffer else value.clone()
            tensors[f"optimizer.{kind}.{name}"] = tensor
    return tensors


def make_state(
    folder: Path,
    fragments: Iterable[Fragment],
    *,
    optimizer: torch.optim.Optimizer,
    kinds: Mapping[str, str],
) -> None:
    """Allocate the optimizer states of a checkpoint for this rank's flat buffers."""
    saved_tensors = dcp_metadata.read(folder)
    for fragment in fragments:
        state = optimizer.state[fragment.flat]
        for kind, like in kinds.items():
            saved = saved_tensors.get(f"optimizer.{kind}.{fragment.chunk.saved_name}")
            if saved is None or kind in state:
                continue
            shape = fragment.flat.shape if like == "like_parameter" else saved.size
            state[kind] = training_state.room(shape, saved.dtype.torch, fragment.flat, optimizer)


def take_shared(
    folder: Path,
    fragments: Iterable[Fragment],
    *,
    states: Mapping[Tensor, dict[str, Any]],
    loaded: training_state.Tensors,
) -> None:
    """Set states that a buffer has once, and a checkpoint once for each parameter: step counts.

    Raises:
        UserError: they differ between parameters that share a buffer.
    """
    first: dict[tuple[Tensor, str], Tensor] = {}
    for fragment in fragments:
        for kind, value in states[fragment.flat].items():
            if value.shape == fragment.flat.shape:
                continue
            key = f"optimizer.{kind}.{fragment.chunk.saved_name}"
            first_value = first.setdefault((fragment.flat, kind), loaded[key])
            if not torch.equal(first_value, loaded[key]):
                raise UserError(
                    f"{folder}: {key} differs from its values of other parameters, which share it "
                    "under ZeRO; set train.zero_stage to 0 or train.backend to native"
                )
            value.copy_(first_value)
