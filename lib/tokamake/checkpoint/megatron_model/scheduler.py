"""State of Megatron's scheduler of the learning rate in checkpoints."""

from collections.abc import Mapping
from typing import Any

from tokamake.checkpoint.tensors.checkpoint import Checkpoint

LR_SCHEDULER = "lr_scheduler"
"""Key of the state of Megatron's scheduler in DeepSpeed's files, and in `Checkpoint.notes`."""
RATES = ("max_lr", "min_lr")
"""Keys of the highest and the lowest learning rate of a schedule."""
OPT_PARAM_SCHEDULER = "opt_param_scheduler"
"""The same key in Megatron-LM's files, since its scheduler also sets the weight decay."""


def scheduler_note(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the note with the state of Megatron's scheduler, if a rank's file has it."""
    schedule = state.get(LR_SCHEDULER, state.get(OPT_PARAM_SCHEDULER))
    if not isinstance(schedule, dict):
        return {}
    plain = (int, float, str, type(None))
    return {
        LR_SCHEDULER: {key: value for key, value in schedule.items() if isinstance(value, plain)}
    }


def scheduler_state(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the state of Megatron's scheduler: its position, and settings if they are known.

    Megatron reads all keys. Unknown settings are None; --override-opt_param-scheduler makes
    Megatron ignore them and take those of the new run.
    """
    rates = (*RATES, "lr_decay_style")
    lengths = ("lr_warmup_steps", "lr_warmup_tokens", "lr_decay_steps", "lr_decay_tokens")
    progress = checkpoint.progress
    position = {"num_steps": progress.consumed_samples, "num_tokens": progress.consumed_tokens}
    settings = checkpoint.notes.get(LR_SCHEDULER, {})
    return {**dict.fromkeys((*rates, *lengths)), **settings, **position}
