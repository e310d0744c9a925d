"""The schedule in a Megatron checkpoint that a run continues, compared with the run's own.

Megatron refuses other values than those in the checkpoint unless it gets
--override-opt_param-scheduler. Here, `train.on_change` decides. This module imports no torch.
"""

import math
from collections.abc import Iterator
from typing import Any

from tokamake.checkpoint.megatron_model.scheduler import LR_SCHEDULER, RATES
from tokamake.checkpoint.tensors.checkpoint import Checkpoint
from tokamake.config.schedule import Span
from tokamake.config.training import TrainSettings
from tokamake.errors import UserError

_STYLES = {
    "constant": "constant",
    "cosine": "cosine",
    "inverse-square-root": "inverse_sqrt",
    "linear": "linear",
    "WSD": "wsd",
}
"""Schedule for Megatron's lr_decay_style."""
_REL_TOLERANCE = 1e-6


def decide_schedule(start: Checkpoint, train: TrainSettings) -> str:
    """Compare the schedules of a Megatron checkpoint and of a run that continues it.

    Returns:
        A line about the differences; empty: there are none.
    """
    schedule = start.notes.get(LR_SCHEDULER, {})
    if train.finetune is not False or schedule.get("lr_decay_style") is None:
        return ""
    lines = ", ".join(_differences(schedule, train))
    if not lines:
        return ""
    text = f"{start.path}: the schedule of the checkpoint and of the config differ: {lines}"
    if train.on_change == "refuse":
        raise UserError(
            f"{text}. train.on_change is refuse: set these as they were, or train.on_change to "
            "'continue', which takes the values of the config"
        )
    return f"{text}. train.on_change is {train.on_change}: training takes the values of the config"


def _differences(schedule: dict[str, Any], train: TrainSettings) -> Iterator[str]:
    """Settings whose value in a checkpoint is another one, such as `NAME 0.001 -> 0.0003`."""
    style = str(schedule["lr_decay_style"])
    if _STYLES.get(style) != train.schedule.name:
        yield f"train.schedule.name {_STYLES.get(style, style)} -> {train.schedule.name}"
        return  # lengths have another meaning
    decay, decay_style = train.optimizer, schedule.get("wd_incr_style")
    changes = decay.weight_decay_at(0.0) != decay.weight_decay_at(1.0)
    if changes and decay_style not in (None, decay.weight_decay_schedule):
        yield (
            f"train.optimizer.weight_decay_schedule {decay_style} -> {decay.weight_decay_schedule}"
        )
    for name, key, value in _values(train, has_minimum=style != "constant"):
        recorded = schedule.get(key)
        if "steps" in key and schedule.get(key.replace("steps", "tokens")):
            continue  # Megatron-DeepSpeed counts this length in tokens
        if isinstance(recorded, int | float) and not _is_close(recorded, value):
            yield f"{name} {recorded:g} -> {value:g}"


def _values(train: TrainSettings, *, has_minimum: bool) -> Iterator[tuple[str, str, float]]:
    """Setting, key of Megatron and value of each number that a schedule has.

    Megatron counts lengths in samples, those in steps as samples of the whole global batch.
    """
    peak, minimum = train.learning_rates
    yield "train.optimizer.learning_rate", RATES[0], peak
    if has_minimum:
        yield "train.schedule.min_learning_rate", RATES[1], minimum
    yield "train.optimizer.weight_decay (start)", "start_wd", train.optimizer.weight_decay_at(0.0)
    yield "train.optimizer.weight_decay (end)", "end_wd", train.optimizer.weight_decay_at(1.0)
    if train.num_steps is None:  # the data give the length
        return
    span = Span(train.num_steps, train.batch_sizes, train.sequence_length)
    lengths = train.schedule.lengths(span)
    unit = 1 if train.schedule.counts_samples else train.global_batch_size
    yield "train.schedule.warmup in samples", "lr_warmup_steps", lengths["warmup"] * unit
    if train.schedule.name in ("cosine", "linear", "wsd"):
        whole = train.schedule.length(span)
        yield "end of the decay in samples", "lr_decay_steps", lengths.get("decay", whole) * unit


def _is_close(recorded: float, value: float) -> bool:
    # A share of the run is no whole number of steps here, and one in Megatron.
    if recorded > 1 and value > 1:
        return abs(recorded - value) < 1 or math.isclose(recorded, value, rel_tol=_REL_TOLERANCE)
    return math.isclose(recorded, value, rel_tol=_REL_TOLERANCE)
