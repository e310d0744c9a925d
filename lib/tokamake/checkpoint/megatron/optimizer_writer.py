"""Adam's states for Megatron-LM's classic files, as `states` reads them.

Float16OptimizerWithFloat16Params loads them beside weights in 16 bit, FP32Optimizer beside fp32
ones. The number of steps is in each group, as the Adam of Apex has it, and with each parameter, as
torch's has.
"""

import struct
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any

from tokamake.checkpoint.deepspeed.folder import LATER_SCHEDULE, new_schedule
from tokamake.checkpoint.deepspeed.zero_adam import MOMENTS, unfit
from tokamake.checkpoint.deepspeed.zero_reader import MASTER, parameter
from tokamake.checkpoint.megatron.optimizer_reader import (
    MASTERS,
    OPTIMIZER,
    SCALE,
    SCALER,
    SINCE,
    STEP,
)
from tokamake.checkpoint.tensors.checkpoint import OPTIMIZER_SETTINGS, Checkpoint
from tokamake.checkpoint.tensors.dtypes import FLOAT32
from tokamake.checkpoint.tensors.extents import Chunk, Extent, PlannedTensor, TensorSource
from tokamake.checkpoint.torch_files import torch_archive

_HYSTERESIS = {"hysteresis_tracker": 2}
"""As it begins by default: overflows until the scale of the loss is lowered."""
_SCALE_NAME = f"{OPTIMIZER}.{SCALER}.{SCALE}"


def has_states(checkpoint: Checkpoint) -> bool:
    """Whether there are states that Megatron-LM could continue with."""
    return any(key.startswith("optimizer.") for key in checkpoint.source) and not unfit(checkpoint)


def left_states(checkpoint: Checkpoint) -> str | None:
    """What to tell of states that Megatron-LM could not continue with."""
    if not any(key.startswith("optimizer.") for key in checkpoint.source):
        return None
    why = unfit(checkpoint)
    return why and f"{checkpoint.path}: {why}: Megatron-LM could not continue with its states"


def exact(tree: Any, source: TensorSource) -> Any:
    """A tree of weights, fp32 ones as the optimizer has them."""
    if isinstance(tree, Mapping):
        return {name: exact(value, source) for name, value in tree.items()}
    return _master(tree, source) if tree.dtype == FLOAT32 else tree


def planned(checkpoint: Checkpoint, weights: Any) -> dict[str, Any]:
    """What a rank's file has beside its weights.

    Args:
        checkpoint: that `has_states`.
        weights: of the file, in its order.
    """
    every = [each for _, each in torch_archive.leaves(weights)]
    decays = [each for each in every if len(each.shape) > 1]
    groups = [decays, [each for each in every if len(each.shape) < 2]]
    saved: dict[str, Any] = {
        "state": {number: _states(each) for number, each in enumerate(chain(*groups))},
        "param_groups": [*_param_groups(checkpoint, [len(group) for group in groups])],
    }
    rounded = [[each for each in group if each.dtype != FLOAT32] for group in groups]
    if any(rounded):
        masters = [[_master(each, checkpoint.source) for each in group] for group in rounded]
        scaler = _scaler(checkpoint, {each.dtype.short for each in every})
        saved = {OPTIMIZER: saved, **scaler, MASTERS: masters}
    return {OPTIMIZER: saved, LATER_SCHEDULE: new_schedule(checkpoint)}


def _states(weights: PlannedTensor) -> dict[str, PlannedTensor]:
    """What the optimizer has for a parameter; nothing for the vocabulary's padding."""
    own = [block for block in weights.blocks if not block.is_mean]
    steps = (Chunk(f"optimizer.{STEP}.{parameter(block.key)}", ()) for block in own)
    return {STEP: PlannedTensor((), FLOAT32, (*steps,))} | {
        kind: PlannedTensor(
            weights.shape,
            FLOAT32,
            (*(each._replace(key=f"optimizer.{kind}.{parameter(each.key)}") for each in own),),
            weights.is_copy,
        )
        for kind in MOMENTS
    }


def _master(weights: PlannedTensor, source: TensorSource) -> PlannedTensor:
    """A parameter's fp32 weights: those that the model's were rounded from, if they are there."""
    blocks = (
        each._replace(key=key if (key := f"{MASTER}{parameter(each.key)}") in source else each.key)
        for each in weights.blocks
    )
    return PlannedTensor(weights.shape, FLOAT32, (*blocks,), weights.is_copy)


def _param_groups(checkpoint: Checkpoint, counts: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Settings in groups of so many parameters, of which the first decays."""
    settings, source = checkpoint.notes[OPTIMIZER_SETTINGS], checkpoint.source
    step = next(key for key in source if key.startswith(f"optimizer.{STEP}."))
    for number, end in enumerate(accumulate(counts)):
        yield {
            **settings,
            "betas": (*settings["betas"],),
            **({"weight_decay": 0.0} if number else {}),
            "wd_mult": 1.0 - number,
            "lr_mult": 1.0,
            "is_expert_parallel": False,
            "is_decoupled_lr": False,
            "default_config": True,
            "bias_correction": True,
            "amsgrad": False,
            STEP: int(source.number(step)),
            "params": [*range(end - counts[number], end)],
        }


def _scaler(checkpoint: Checkpoint, precisions: Container[str | None]) -> dict[str, Any]:
    """What scales the loss, in fp16, where it is known."""
    scale, since = checkpoint.notes.get("loss_scale", (1.0, 0))
    if "fp16" not in precisions or scale == 1.0:
        return {}
    return {SCALER: {SCALE: PlannedTensor((1,), FLOAT32, ()), SINCE: since, **_HYSTERESIS}}


def write_scale(checkpoint: Checkpoint, regions: Iterable[Extent]) -> None:
    """Write the scale of the loss, which no tensor of the checkpoint is, into a file laid out.

    Args:
        checkpoint: that it is of.
        regions: of the file.
    """
    for region in regions:
        if region.name == _SCALE_NAME:
            with region.file.open("r+b") as stream:
                stream.seek(region.offset)
                stream.write(struct.pack("<f", checkpoint.notes["loss_scale"][0]))
