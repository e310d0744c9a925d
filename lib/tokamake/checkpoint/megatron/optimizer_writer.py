"""Adam's states in Megatron-LM's classic files, which `optimizer_reader` reads.

Megatron's Float16OptimizerWithFloat16Params loads them for weights in 16 bit, FP32Optimizer for
fp32 weights. The step count is in each group, for the Adam of Apex, and with each parameter, for
torch's. The distributed optimizer loads them from flat buffers in a file of its own.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any

from tokamake.checkpoint.megatron.optimizer_reader import COALESCED, MASTERS, SIZE, WEIGHTS
from tokamake.checkpoint.megatron_model import adam
from tokamake.checkpoint.megatron_model.adam import OPTIMIZER, STEP
from tokamake.checkpoint.megatron_model.optimizer_buffers import buffer_places
from tokamake.checkpoint.megatron_model.optimizer_states import (
    OPT_PARAM_SCHEDULER,
    scheduler_state,
    state_chunks,
)
from tokamake.checkpoint.tensors.checkpoint import Checkpoint
from tokamake.checkpoint.tensors.dtypes import FLOAT32
from tokamake.checkpoint.tensors.extents import Chunk, PlannedTensor
from tokamake.checkpoint.tensors.source import TensorSource
from tokamake.checkpoint.torch_files import torch_archive
from tokamake.checkpoint.torch_files.pickle_writer import Global
from tokamake.errors import UserError


def with_master_weights(tree: Any, source: TensorSource) -> Any:
    """Return a tree of planned weights with the optimizer's exact values for fp32 weights."""
    if isinstance(tree, Mapping):
        return {name: with_master_weights(value, source) for name, value in tree.items()}
    return adam.planned_master(tree, source) if tree.dtype == FLOAT32 else tree


def planned_buffers(checkpoint: Checkpoint, stages: Iterable[Any]) -> dict[Any, Any]:
    """Return the content of the distributed optimizer's file: buffers without data."""
    buffers: dict[Any, Any] = {COALESCED: True}
    for number, weights in enumerate(stages):
        tensors = _leaves(weights)
        starts, size = buffer_places([tensor.shape for tensor in tensors])
        dtypes = {tensor.dtype for tensor in tensors}
        if len(dtypes) > 1:
            names = " and ".join(sorted(str(dtype.short) for dtype in dtypes))
            raise UserError(
                f"--zero-stage 1: weights in {names}: the distributed optimizer has one buffer; "
                "give --dtype"
            )

        def buffer(planned: Iterable[PlannedTensor], starts: Sequence[int], size: int) -> Any:
            chunks = (
                chunk._replace(start=chunk.start + start)
                for tensor, start in zip(planned, starts, strict=True)
                for chunk in tensor.chunks
            )
            return PlannedTensor((size,), FLOAT32, (*chunks,))

        masters = (adam.planned_master(tensor, checkpoint.source) for tensor in tensors)
        moments = {
            kind: buffer((adam.planned_moment(each, kind) for each in tensors), starts, size)
            for kind in adam.MOMENTS
        }
        (dtype,) = dtypes
        # Megatron-LM adds up gradients in fp32, in a run with fp16 by default in fp16.
        gradients = dtype if dtype.short == "fp16" else FLOAT32
        key = (Global("torch", dtype.name), Global("torch", gradients.name))
        buffers[number] = {key: {WEIGHTS: buffer(masters, starts, size), **moments, SIZE: size}}
    return buffers


def _leaves(weights: Any) -> list[PlannedTensor]:
    return [tensor for _, tensor in torch_archive.leaves(weights)]


def planned_states(
    checkpoint: Checkpoint, parts: Sequence[Any], *, is_distributed: bool
) -> dict[str, Any]:
    """Return the entries of a rank's file for the optimizer and the scheduler.

    `parts` are the weights of each optimizer: of the only one, or of everything else and experts.
    """
    saved = [
        _optimizer(checkpoint, weights, is_distributed=is_distributed, of_experts=number == 1)
        for number, weights in enumerate(parts)
    ]
    state = saved if len(saved) > 1 else saved[0]
    return {OPTIMIZER: state, OPT_PARAM_SCHEDULER: scheduler_state(checkpoint)}


def _optimizer(
    checkpoint: Checkpoint, weights: Any, *, is_distributed: bool, of_experts: bool
) -> dict[str, Any]:
    tensors = _leaves(weights)
    # Matrices decay; norms and biases do not. Most experts have none of these.
    groups = [
        [tensor for tensor in tensors if len(tensor.shape) > 1],
        [tensor for tensor in tensors if len(tensor.shape) < 2],
    ]
    groups = [group for group in groups if group or not of_experts]
    scaler = adam.loss_scaler(checkpoint, {tensor.dtype.short for tensor in tensors})
    counts = [len(group) for group in groups]
    settings = [*_param_groups(checkpoint, counts, of_experts=of_experts)]
    if is_distributed:
        for group in settings:
            del group["params"]
        return {OPTIMIZER: {"param_groups": settings}, **scaler}
    saved: dict[str, Any] = {
        "state": {number: _states(tensor) for number, tensor in enumerate(chain(*groups))},
        "param_groups": settings,
    }
    rounded = [[tensor for tensor in group if tensor.dtype != FLOAT32] for group in groups]
    if any(rounded):
        # Float16OptimizerWithFloat16Params wraps the state of torch's optimizer.
        masters = [
            [adam.planned_master(tensor, checkpoint.source) for tensor in group]
            for group in rounded
        ]
        saved = {OPTIMIZER: saved, **scaler, MASTERS: masters}
    return saved


def _states(weights: PlannedTensor) -> dict[str, PlannedTensor]:
    """Return the states of a parameter; states of the vocabulary's padding stay 0."""
    step_chunks = state_chunks(weights.chunks, f"optimizer.{STEP}.")
    steps = (Chunk(chunk.key, ()) for chunk in step_chunks)
    states = {STEP: PlannedTensor((), FLOAT32, (*steps,))}
    return states | {kind: adam.planned_moment(weights, kind) for kind in adam.MOMENTS}


def _param_groups(
    checkpoint: Checkpoint, counts: Sequence[int], *, of_experts: bool
) -> Iterator[dict[str, Any]]:
    """Yield the settings of each group; only the first decays."""
    for index, end in enumerate(accumulate(counts)):
        settings = adam.param_group(checkpoint, decays=not index, of_experts=of_experts)
        yield {**settings, "params": [*range(end - counts[index], end)]}
