"""Adam's states in Megatron-LM's classic files, which `optimizer_reader` reads.

Megatron's Float16OptimizerWithFloat16Params loads them for weights in 16 bit, FP32Optimizer for
fp32 weights. The step count is in each group, for the Adam of Apex, and with each parameter, for
torch's.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any

from tokamake.checkpoint.megatron.optimizer_reader import MASTERS
from tokamake.checkpoint.megatron_model import adam
from tokamake.checkpoint.megatron_model.adam import OPTIMIZER, STEP
from tokamake.checkpoint.megatron_model.optimizer_states import state_chunks
from tokamake.checkpoint.megatron_model.scheduler import OPT_PARAM_SCHEDULER, scheduler_state
from tokamake.checkpoint.tensors.checkpoint import Checkpoint
from tokamake.checkpoint.tensors.dtypes import FLOAT32
from tokamake.checkpoint.tensors.extents import Chunk, PlannedTensor
from tokamake.checkpoint.tensors.source import TensorSource
from tokamake.checkpoint.torch_files import torch_archive


def with_master_weights(tree: Any, source: TensorSource) -> Any:
    """Return a tree of planned weights with the optimizer's exact values for fp32 weights."""
    if isinstance(tree, Mapping):
        return {name: with_master_weights(value, source) for name, value in tree.items()}
    return adam.planned_master(tree, source) if tree.dtype == FLOAT32 else tree


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
        masters = [
            [adam.planned_master(tensor, checkpoint.source) for tensor in group]
            for group in rounded
        ]
        scaler = adam.loss_scaler(checkpoint, {tensor.dtype.short for tensor in tensors})
        saved = {OPTIMIZER: saved, **scaler, MASTERS: masters}
    return {OPTIMIZER: saved, OPT_PARAM_SCHEDULER: scheduler_state(checkpoint)}


def _states(weights: PlannedTensor) -> dict[str, PlannedTensor]:
    """Return the states of a parameter; those of the vocabulary's padding stay 0."""
    step_chunks = state_chunks(weights.chunks, f"optimizer.{STEP}.")
    steps = (Chunk(chunk.key, ()) for chunk in step_chunks)
    states = {STEP: PlannedTensor((), FLOAT32, (*steps,))}
    return states | {kind: adam.planned_moment(weights, kind) for kind in adam.MOMENTS}


def _param_groups(checkpoint: Checkpoint, counts: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield the settings of each group.

    Args:
        checkpoint: checkpoint with the settings.
        counts: number of parameters in each group. Only the first decays.
    """
    for index, end in enumerate(accumulate(counts)):
        settings = adam.param_group(checkpoint, decays=not index)
        yield {**settings, "params": [*range(end - counts[index], end)]}
