"""Adam's states in Megatron-LM's classic files, which `optimizer_reader` reads.

Megatron's Float16OptimizerWithFloat16Params loads them for weights in 16 bit, FP32Optimizer for
fp32 weights. The step count is in each group, for the Adam of Apex, and with each parameter, for
torch's.
"""

import struct
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any

from tokamake.checkpoint.megatron.optimizer_reader import (
    GROWTH,
    MASTERS,
    OPTIMIZER,
    SCALE,
    SCALER,
    STEP,
)
from tokamake.checkpoint.megatron_model.adam import MOMENTS, adam_problem, has_states
from tokamake.checkpoint.megatron_model.optimizer_states import MASTER, parameter_name, state_chunks
from tokamake.checkpoint.megatron_model.scheduler import OPT_PARAM_SCHEDULER, scheduler_state
from tokamake.checkpoint.tensors.checkpoint import OPTIMIZER_SETTINGS, Checkpoint
from tokamake.checkpoint.tensors.dtypes import FLOAT32
from tokamake.checkpoint.tensors.extents import Chunk, Extent, PlannedTensor
from tokamake.checkpoint.tensors.source import TensorSource
from tokamake.checkpoint.torch_files import torch_archive

_HYSTERESIS = {"hysteresis_tracker": 2}
"""Megatron's default: the number of overflows before the loss scale decreases."""
_SCALE_NAME = f"{OPTIMIZER}.{SCALER}.{SCALE}"


def has_loadable_states(checkpoint: Checkpoint) -> bool:
    """Return whether Megatron-LM can resume from a checkpoint's optimizer states."""
    return has_states(checkpoint) and not adam_problem(checkpoint)


def unloadable_states_warnings(checkpoint: Checkpoint) -> list[str]:
    """Return a warning if Megatron-LM cannot resume from a checkpoint's optimizer states."""
    problem = adam_problem(checkpoint) if has_states(checkpoint) else None
    message = f"{checkpoint.path}: {problem}: Megatron-LM cannot resume from its states"
    return [message] if problem else []


def with_master_weights(tree: Any, source: TensorSource) -> Any:
    """Return a tree of planned weights with the optimizer's exact values for fp32 weights."""
    if isinstance(tree, Mapping):
        return {name: with_master_weights(value, source) for name, value in tree.items()}
    return _master(tree, source) if tree.dtype == FLOAT32 else tree


def planned_states(checkpoint: Checkpoint, weights: Any) -> dict[str, Any]:
    """Return the entries of a rank's file for the optimizer and the scheduler.

    Args:
        checkpoint: checkpoint with loadable states.
        weights: planned weights of the file, in its order.
    """
    tensors = [tensor for _, tensor in torch_archive.leaves(weights)]
    # Matrices decay; norms and biases do not.
    groups = [
        [tensor for tensor in tensors if len(tensor.shape) > 1],
        [tensor for tensor in tensors if len(tensor.shape) < 2],
    ]
    saved: dict[str, Any] = {
        "state": {number: _states(tensor) for number, tensor in enumerate(chain(*groups))},
        "param_groups": [*_param_groups(checkpoint, [len(group) for group in groups])],
    }
    rounded = [[tensor for tensor in group if tensor.dtype != FLOAT32] for group in groups]
    if any(rounded):
        # Float16OptimizerWithFloat16Params wraps the state of torch's optimizer.
        masters = [[_master(tensor, checkpoint.source) for tensor in group] for group in rounded]
        scaler = _loss_scaler(checkpoint, {tensor.dtype.short for tensor in tensors})
        saved = {OPTIMIZER: saved, **scaler, MASTERS: masters}
    return {OPTIMIZER: saved, OPT_PARAM_SCHEDULER: scheduler_state(checkpoint)}


def _states(weights: PlannedTensor) -> dict[str, PlannedTensor]:
    """Return the states of a parameter; those of the vocabulary's padding stay 0."""
    step_chunks = state_chunks(weights.chunks, f"optimizer.{STEP}.")
    steps = (Chunk(chunk.key, ()) for chunk in step_chunks)
    states = {STEP: PlannedTensor((), FLOAT32, (*steps,))}
    for kind in MOMENTS:
        chunks = (*state_chunks(weights.chunks, f"optimizer.{kind}."),)
        states[kind] = PlannedTensor(weights.shape, FLOAT32, chunks, weights.is_replica)
    return states


def _master(weights: PlannedTensor, source: TensorSource) -> PlannedTensor:
    """Return the fp32 master weights of a parameter, or its weights in fp32 if it has none."""
    chunks = (
        chunk._replace(key=key if key in source else chunk.key)
        for chunk in weights.chunks
        for key in [f"{MASTER}{parameter_name(chunk.key)}"]
    )
    return PlannedTensor(weights.shape, FLOAT32, (*chunks,), weights.is_replica)


def _param_groups(checkpoint: Checkpoint, counts: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield the settings of each group.

    Args:
        checkpoint: checkpoint with the settings.
        counts: number of parameters in each group. Only the first decays.
    """
    settings, source = checkpoint.notes[OPTIMIZER_SETTINGS], checkpoint.source
    # All parameters have the same step count (`adam_problem`).
    step = next(key for key in source if key.startswith(f"optimizer.{STEP}."))
    for index, end in enumerate(accumulate(counts)):
        yield {
            **settings,
            "betas": (*settings["betas"],),
            **({"weight_decay": 0.0} if index else {}),
            "wd_mult": 1.0 - index,
            "lr_mult": 1.0,
            "is_expert_parallel": False,
            "is_decoupled_lr": False,
            "default_config": True,
            "bias_correction": True,
            "amsgrad": False,
            STEP: int(source.number(step)),
            "params": [*range(end - counts[index], end)],
        }


def _loss_scaler(checkpoint: Checkpoint, dtypes: Container[str | None]) -> dict[str, Any]:
    """Return the state of the loss scaler, if weights are fp16 and the scale is known."""
    scale, growth = checkpoint.notes.get("loss_scale", (1.0, 0))
    if "fp16" not in dtypes or scale == 1.0:
        return {}
    return {SCALER: {SCALE: PlannedTensor((1,), FLOAT32, ()), GROWTH: growth, **_HYSTERESIS}}


def write_loss_scale(checkpoint: Checkpoint, extents: Iterable[Extent]) -> None:
    """Write the loss scale into a file that is laid out.

    Megatron keeps it as a tensor, but it is not a tensor of the checkpoint, so that copying the
    tensors does not write it.
    """
    for extent in extents:
        if extent.name == _SCALE_NAME:
            with extent.file.open("r+b") as stream:
                stream.seek(extent.offset)
                stream.write(struct.pack("<f", checkpoint.notes["loss_scale"][0]))
