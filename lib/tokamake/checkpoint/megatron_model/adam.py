"""Adam's states in Megatron's checkpoints, which have a single step count and learning rate."""

import re
import struct
from collections.abc import Container, Iterable
from typing import Any

from tokamake.checkpoint.megatron_model.optimizer_states import (
    LR_SCHEDULER,
    MASTER,
    MODEL,
    RATES,
    parameter_name,
    state_chunks,
)
from tokamake.checkpoint.model_tensors import WITHOUT_GRADIENT
from tokamake.checkpoint.tensors.checkpoint import OPTIMIZER_SETTINGS, Checkpoint
from tokamake.checkpoint.tensors.dtypes import FLOAT32
from tokamake.checkpoint.tensors.extents import Extent, PlannedTensor
from tokamake.checkpoint.tensors.source import TensorSource
from tokamake.config.optimization import zero_file_optimizers
from tokamake.errors import UserError

OPTIMIZER, SCALER = "optimizer", "grad_scaler"
"""Keys of the states of torch's optimizer and of the loss scaler in Megatron's optimizer.
The first is also the key of Megatron's optimizer itself."""
STEP, SCALE, GROWTH = "step", "scale", "growth_tracker"
"""Keys in a parameter's state or a group, and in the loss scaler's state."""

MOMENTS = ("exp_avg", "exp_avg_sq")
_HYSTERESIS = {"hysteresis_tracker": 2}
"""Megatron's default: the number of overflows before the loss scale decreases."""
_SCALE_NAME = re.compile(rf"{OPTIMIZER}\.(\d\.)?{SCALER}\.{SCALE}")
"""Name of the loss scale: of an optimizer, or of one of several."""
_REQUIRED_SETTINGS = {
    "lr": "learning rate",
    "betas": "betas",
    "eps": "epsilon",
    "weight_decay": "weight decay",
}


def has_states(checkpoint: Checkpoint) -> bool:
    return any(key.startswith("optimizer.") for key in checkpoint.source)


def check_states(checkpoint: Checkpoint, zero_stage: int, *, otherwise: str) -> None:
    """Check that there are Adam's states to share over ranks; `otherwise`: effect and remedy."""
    if not has_states(checkpoint):
        raise UserError(
            f"{checkpoint.path}: has no optimizer states for --zero-stage {zero_stage}; leave the "
            "option out, or give another checkpoint"
        )
    if problem := adam_problem(checkpoint):
        raise UserError(f"{checkpoint.path}: {problem}, {otherwise}")


def adam_problem(checkpoint: Checkpoint) -> str | None:
    """Return why Adam cannot resume from a checkpoint's states, or None if it can."""
    source = checkpoint.source
    states = {key for key in source if key.startswith("optimizer.")}
    names = [
        key.removeprefix(MODEL)
        for key in source
        if key.startswith(MODEL) and not key.endswith(WITHOUT_GRADIENT)
    ]
    expected = {f"optimizer.{kind}.{name}" for kind in ("step", *MOMENTS) for name in names}
    optimizer = checkpoint.notes.get("optimizer", "adamw")
    if states != expected or optimizer not in zero_file_optimizers():
        kinds = ", ".join(sorted({key.split(".")[1] for key in states}))
        return f"has states {kinds} of {optimizer}, not Adam's states of each parameter"
    steps = {source.number(f"optimizer.step.{name}") for name in names}
    if len(steps) > 1:
        return f"has parameters that were updated {min(steps):,.0f} to {max(steps):,.0f} times"
    settings = checkpoint.notes.get(OPTIMIZER_SETTINGS, {})
    if missing := [label for name, label in _REQUIRED_SETTINGS.items() if name not in settings]:
        return f"does not record its optimizer's {', '.join(missing)}"
    return None


def has_loadable_states(checkpoint: Checkpoint) -> bool:
    """Return whether Megatron-LM can resume from a checkpoint's optimizer states."""
    return has_states(checkpoint) and not adam_problem(checkpoint)


def unloadable_states_warnings(checkpoint: Checkpoint) -> list[str]:
    """Return a warning if Megatron-LM cannot resume from a checkpoint's optimizer states."""
    if not has_states(checkpoint):
        return []
    if problem := adam_problem(checkpoint):
        return [f"{checkpoint.path}: {problem}: Megatron-LM cannot resume from its states"]
    schedule = checkpoint.notes.get(LR_SCHEDULER, {})
    if missing := [name for name in RATES if schedule.get(name) is None]:
        return [
            f"{checkpoint.path}: does not record {' and '.join(missing)} of its schedule: "
            "Megatron-LM of 2026 and later refuses its optimizer states; give it --no-load-optim"
        ]
    return []


def planned_moment(weights: PlannedTensor, kind: str) -> PlannedTensor:
    """Return a moment of a parameter to be written; it is 0 for the vocabulary's padding."""
    chunks = (*state_chunks(weights.chunks, f"optimizer.{kind}."),)
    return PlannedTensor(weights.shape, FLOAT32, chunks, weights.is_replica)


def master_key(key: str, source: TensorSource) -> str:
    """Return the key of the fp32 master weights of a parameter, or its own key if it has none."""
    master = f"{MASTER}{parameter_name(key)}"
    return master if master in source else key


def planned_master(weights: PlannedTensor, source: TensorSource) -> PlannedTensor:
    """Return the fp32 master weights of a parameter, or its weights in fp32 if it has none."""
    chunks = (chunk._replace(key=master_key(chunk.key, source)) for chunk in weights.chunks)
    return PlannedTensor(weights.shape, FLOAT32, (*chunks,), weights.is_replica)


def param_group(
    checkpoint: Checkpoint, *, decays: bool, of_experts: bool = False
) -> dict[str, Any]:
    """Return the settings of a parameter group of Megatron's optimizer, without its parameters."""
    settings, source = checkpoint.notes[OPTIMIZER_SETTINGS], checkpoint.source
    schedule = checkpoint.notes.get(LR_SCHEDULER, {})
    # All parameters have the same step count (`adam_problem`).
    step = next(key for key in source if key.startswith(f"optimizer.{STEP}."))
    return {
        **settings,
        "betas": (*settings["betas"],),
        **({} if decays else {"weight_decay": 0.0}),
        "wd_mult": float(decays),
        "lr_mult": 1.0,
        "is_expert_parallel": of_experts,
        "is_decoupled_lr": False,
        # Megatron-LM since 2026 finds a group by these rates, --lr and --min-lr.
        **{name: schedule[name] for name in RATES if schedule.get(name) is not None},
        "default_config": True,
        "bias_correction": True,
        "amsgrad": False,
        STEP: int(source.number(step)),
    }


def loss_scaler(checkpoint: Checkpoint, dtypes: Container[str | None]) -> dict[str, Any]:
    """Return the state of the loss scaler, if weights are fp16 and the scale is known."""
    scale, growth = checkpoint.notes.get("loss_scale", (1.0, 0))
    if "fp16" not in dtypes or scale == 1.0:
        return {}
    return {SCALER: {SCALE: PlannedTensor((1,), FLOAT32, ()), GROWTH: growth, **_HYSTERESIS}}


def write_loss_scale(checkpoint: Checkpoint, extents: Iterable[Extent]) -> None:
    """Write the loss scale into a file that is laid out: it is no tensor of the checkpoint."""
    for extent in extents:
        if _SCALE_NAME.fullmatch(extent.name):
            with extent.file.open("r+b") as stream:
                stream.seek(extent.offset)
                stream.write(struct.pack("<f", checkpoint.notes["loss_scale"][0]))
