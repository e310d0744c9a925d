"""What DeepSpeed holds on this rank of each parameter: a run of elements in a flat fp32 buffer.

The same for all ZeRO stages; the engine fills the pieces with the weights of a start, and
checkpoints with the pieces.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokamake.checkpoint.native import training_state
from tokamake.checkpoint.native.flat_chunks import FlatChunks, boxes
from tokamake.errors import UserError
from tokamake.parallel.sharding import Held


@dataclass(frozen=True)
class PartitionedParameter:
    """This rank's piece of a parameter."""

    held: Held
    """The parameter, as tensor and pipeline parallelism have cut it."""
    start: int
    """Elements of the flattened parameter before the piece."""
    flat: Tensor
    """Buffer of weights that the optimizer sees as one parameter."""
    offset: int
    """Elements of it before the piece."""
    size: int
    """Elements of the piece."""

    def of(self, tensor: Tensor) -> Tensor:
        """The piece of the buffer, or of an optimizer state that is like the buffer."""
        return tensor.detach().view(-1).narrow(0, self.offset, self.size)

    def place(self, tensor: Tensor) -> FlatChunks:
        """The piece of such a tensor, as a part of the whole one."""
        parts = boxes(self.of(tensor), self.start, self.held.place)
        return FlatChunks(self.held.shape, tensor.dtype, parts)


def pieces(held: Iterable[Held], optimizer: Any, stage: int) -> list[PartitionedParameter]:
    """What this rank holds of parameters, least pieces of which it holds nothing.

    Args:
        held: parameters that DeepSpeed has taken.
        optimizer: DeepSpeed's.
        stage: of ZeRO.
    """
    find = (_whole, _partition, _partition, _slice)[stage]
    return [piece for one in held for piece in find(one, optimizer) if piece.size]


def _whole(held: Held, _: Any) -> Iterator[PartitionedParameter]:
    yield PartitionedParameter(held, 0, held.local, 0, held.local.numel())


def _partition(held: Held, optimizer: Any) -> Iterator[PartitionedParameter]:
    """Stages 1 and 2: ranks share a group of parameters, laid one after the other."""
    mapping: Any = getattr(held.parameter, "_hp_mapping", None)
    if mapping is not None:
        # The first is of the optimizer that stage 1 has in bf16.
        groups = getattr(optimizer, "fp32_groups_flat_partition", None)
        groups = groups or optimizer.single_partition_of_fp32_groups
        flat = groups[mapping.param_group_index]
        low, high = mapping.lp_fragment_address, mapping.hp_fragment_address
        yield PartitionedParameter(held, low.start, flat, high.start, high.numel)


def _slice(held: Held, optimizer: Any) -> Iterator[PartitionedParameter]:
    """Stage 3: ranks share each parameter; the last ones' slices are filled up."""
    parameter: Any = held.parameter
    group, offset, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
    start = size * optimizer._get_param_partition_rank(parameter)
    left = max(0, parameter.ds_numel - start)
    yield PartitionedParameter(
        held, start, optimizer.fp32_partitioned_groups_flat[group], offset, min(size, left)
    )


@contextmanager
def seen_by_optimizer(optimizer: Any, stage: int) -> Iterator[None]:
    """Let torch's optimizer see its parameters, which stage 3 shows it in turn only."""
    if stage == 3:
        optimizer._set_fp32_optimizer_param_groups()
    yield
    if stage == 3:
        optimizer._clear_fp32_optimizer_param_groups()


@torch.no_grad()
def publish(optimizer: Any, stage: int) -> None:
    """Let the model have the weights that the pieces hold; all ranks call it."""
    if stage in (1, 2):
        optimizer.update_lp_params()
    if stage == 3:
        optimizer._partition_all_parameters()
        for number in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(number)
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)


def tensors_of(
    found: Iterable[PartitionedParameter], states: Mapping[Tensor, dict[str, Any]]
) -> training_state.Tensors:
    """Weights and optimizer states that this rank has a part in, by a checkpoint's keys.

    Args:
        found: pieces.
        states: of the optimizer, by `PartitionedParameter.flat`.
    """
    tensors: training_state.Tensors = {}
    for piece in found:
        name = piece.held.saved_name
        tensors[f"model.{name}"] = piece.place(piece.flat)
        for kind, value in states.get(piece.flat, {}).items():
            whole = value.shape == piece.flat.shape
            tensors[f"optimizer.{kind}.{name}"] = piece.place(value) if whole else value.clone()
    return tensors


def make_state(
    folder: Path,
    found: Iterable[PartitionedParameter],
    optimizer: torch.optim.Optimizer,
    kinds: Mapping[str, str],
) -> None:
    """Make room in an optimizer for the states that a checkpoint has.

    Args:
        folder: the checkpoint.
        found: all pieces of this rank.
        optimizer: torch's, whose parameters are the buffers.
        kinds: STATE of the optimizer's plug-in.
    """
    known = training_state.saved_in(folder)
    for piece in found:
        state = optimizer.state[piece.flat]
        for kind, like in kinds.items():
            saved = known.get(f"optimizer.{kind}.{piece.held.saved_name}")
            if saved is None or kind in state:
                continue
            shape = piece.flat.shape if like == "like_parameter" else saved.size
            state[kind] = training_state.room(shape, saved.dtype.torch, piece.flat, optimizer)


def take_shared(
    folder: Path,
    found: Iterable[PartitionedParameter],
    states: Mapping[Tensor, dict[str, Any]],
    loaded: training_state.Tensors,
) -> None:
    """Let buffers have the states that a checkpoint has once for each parameter, such as steps.

    Raises:
        UserError: they differ between parameters that share a buffer.
    """
    first: dict[tuple[Tensor, str], Tensor] = {}
    for piece in found:
        for kind, value in states[piece.flat].items():
            if value.shape == piece.flat.shape:
                continue
            key = f"optimizer.{kind}.{piece.held.saved_name}"
            taken = first.setdefault((piece.flat, kind), loaded[key])
            if not torch.equal(taken, loaded[key]):
                raise UserError(
                    f"{folder}: {key} differs from those of other parameters, which share it "
                    "under ZeRO; set train.zero_stage to 0 or train.backend to native"
                )
            value.copy_(taken)
