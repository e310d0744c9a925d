"""The checkpoint that a run starts from, and whether it fits the run; no tensor is read.

The workflow checks it before any job runs, `resolve` checks it again, and `train` checks that it is
still the same.
"""

import math
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokamake import plugins
from tokamake.checkpoint import model_tensors
from tokamake.checkpoint.detect import open_any, title
from tokamake.checkpoint.megatron_model.optimizer_states import LR_SCHEDULER, RATES
from tokamake.checkpoint.native.folder import NativeCheckpoint, open_native
from tokamake.checkpoint.tensors.checkpoint import Checkpoint
from tokamake.config.architecture import Architecture
from tokamake.config.architecture_files import read_architecture
from tokamake.config.optimization import OptimizerSettings
from tokamake.config.resolved_run import Run
from tokamake.config.schedule import Span
from tokamake.config.training import TrainSettings
from tokamake.errors import UserError
from tokamake.preflight.other_family import (
    architecture_from,
    check_weights_alone,
    other_starts,
)

_FINETUNE_REMEDY = "set train.finetune to true to load only its weights"
_OPTIMIZER_REMEDY = (
    "set train.load_optimizer to false for a new optimizer at the same step, or train.finetune to "
    "true to load only its weights"
)
_WITHOUT_EFFECT = {"initializer_range"}
"""Fields of an architecture that do not matter once there are weights."""


def initial_architecture(
    start: Architecture, stated: Path | None, *, source: object, parent: str | None = None
) -> Architecture:
    """Architecture of a run that starts from a checkpoint; it must match the file of the config.

    Towers and experts may start from another family, see `other_family`.

    Args:
        stated: file of the architecture; one without vocab_size fits any. None: the checkpoint
            decides.
        source: the checkpoint, for messages.
        parent: run whose last checkpoint it is; the file then decides fields about positions.
    """
    if stated is None:
        return start
    wanted = read_architecture(stated)
    if own := architecture_from(start, wanted, source=source, stated=stated):
        return own
    if start.family != wanted.family:
        raise UserError(
            f"{source}: does not match model.architecture: the model is of family {start.family}, "
            f"and {stated} of family {wanted.family}; name the matching "
            f"file, or {other_starts(wanted)}"
        )
    values, expected = dict(start), dict(wanted)
    # A dump leaves out a head_dim that follows from hidden_size: that would be a second line.
    names = wanted.model_dump().keys() | start.model_dump().keys()
    names -= {*_WITHOUT_EFFECT, *(start.position_fields if parent else ())}
    if expected["vocab_size"] is None or values["vocab_size"] is None:  # the tokenizer decides
        names.remove("vocab_size")
    owner = f"run {parent}" if parent else "checkpoint"
    lines = [
        f"{name}: {owner} {values.get(name)}, config {expected[name]} ({stated})"
        for name in expected
        if name in names and expected[name] != values.get(name)
    ]
    if lines:
        raise UserError(
            f"{source}: does not match model.architecture; name the matching file, "
            f"or from_checkpoint{_further_layers_remedy(start, wanted)}\n" + "\n".join(lines)
        )
    return start.with_positions_of(wanted) if parent else start


def _further_layers_remedy(start: Architecture, wanted: Architecture) -> str:
    """Remedy for another number of layers that predict further tokens (MTP); may be empty."""
    number = start.num_mtp_layers
    if number == wanted.num_mtp_layers:
        return ""
    has = f"has {number} layers" if number else "has no layers"
    return f"; it {has} that predict further tokens: set num_nextn_predict_layers to {number}"


def check_start(start: Checkpoint, train: TrainSettings, *, architecture: Architecture) -> None:
    """Check that a run of this architecture can start from a checkpoint; to continue needs more."""
    check_weights_alone(start.architecture, architecture, train=train, source=start.path)
    if train.finetune is not False:
        return
    if train.load_optimizer:
        _check_states(start, train.optimizer)
    progress = start.progress
    check_progress(train, progress.iteration, consumed=progress.consumed_samples, source=start.path)


def check_progress(train: TrainSettings, step: int, *, consumed: int, source: object) -> None:
    """Check that a step is left after a checkpoint, and that the batch sizes were the same."""
    last = train.num_steps
    if last is not None and step >= last:
        raise UserError(
            f"{source}: is at step {step:,} already, and the run ends at step {last:,}; raise "
            f"train.train_steps, or {_FINETUNE_REMEDY}"
        )
    if consumed != (expected := train.batch_sizes.samples(step)):
        raise UserError(
            f"{source}: has consumed {consumed:,} samples in {step:,} steps, with "
            f"train.global_batch_size and rampup_batch_size it would be {expected:,}; set these as "
            f"they were, or {_FINETUNE_REMEDY}"
        )


def check_optimizer(saved: str, name: str, *, source: object) -> None:
    """Check that a run continues with the optimizer of a checkpoint."""
    if saved != name:
        raise UserError(
            f"{source}: has optimizer states of {saved}, not of {name}; set "
            f"train.optimizer.name to {saved}, or {_OPTIMIZER_REMEDY}"
        )


def _check_states(start: Checkpoint, settings: OptimizerSettings) -> None:
    """Check that a checkpoint has exactly the states of the run's optimizer."""
    name = settings.name
    actual = {key for key in start.source if key.startswith("optimizer.")}
    expected = state_keys(start.architecture, settings)
    if expected and not actual:
        raise UserError(
            f"{start.path}: has no optimizer states of {name} to continue with; {_OPTIMIZER_REMEDY}"
        )
    check_optimizer(start.notes.get("optimizer", name), name, source=start.path)
    for keys, problem in (
        (expected - actual, "has no"),
        (actual - expected, f"{name} does not use its"),
    ):
        if keys:
            more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
            raise UserError(
                f"{start.path}: {problem} {min(keys)}{more}, so its optimizer was not {name}; "
                f"set train.optimizer.name as it was, or {_OPTIMIZER_REMEDY}"
            )


def state_keys(architecture: Architecture, settings: OptimizerSettings) -> set[str]:
    """Keys of an optimizer's states in a checkpoint of a model, after the first step.

    The optimizer takes one step on tiny parameters: its states depend only on names and numbers
    of dimensions.
    """
    import torch

    from tokamake.optim._groups import parameter_groups
    from tokamake.optim._sharded_parameters import UNSHARDED

    plug_in = plugins.load("optim", settings.name)
    named = [
        (name, torch.nn.Parameter(torch.ones([2] * len(shape))))
        for name, shape in model_tensors.shapes(architecture).items()
        if not name.endswith(model_tensors.WITHOUT_GRADIENT)
    ]
    for _, parameter in named:
        parameter.grad = torch.ones_like(parameter)
    optimizer = plug_in.build(parameter_groups(named, 0.0), settings, whole=UNSHARDED)
    if hasattr(optimizer, "train"):
        optimizer.train()
    optimizer.step()
    return {
        f"optimizer.{kind}.{name}"
        for name, parameter in named
        for kind in optimizer.state[parameter].keys() & plug_in.STATE
    }


def check_native(checkpoint: Path, start: Checkpoint) -> None:
    """Check that a checkpoint has the native format, in which each rank reads only its chunks."""
    if start.format != "native":
        command = ("tokamake", "convert", "--from", checkpoint, "--to", f"{checkpoint}-native")
        raise UserError(
            f"{checkpoint}: is a checkpoint of {title(start.format)}, which training does not "
            f"read; convert it first: {shlex.join(map(str, command))} --format native"
        )


def check_begun(run: Run) -> None:
    """Check that a checkpoint to continue is still the one that the run was resolved for.

    Prints a line if the checkpoint has Megatron's schedule, and the run has another one.
    """
    assert run.checkpoint is not None, "a run that continues has a checkpoint"
    start = open_any(run.checkpoint)
    check_start(start, run.train, architecture=run.architecture)
    progress = start.progress
    actual = progress.iteration, progress.consumed_samples
    if not _has_architecture(start, run) or actual != (run.step, run.consumed_samples):
        raise UserError(
            f"{run.checkpoint}: is not at the step or of the architecture that the run was "
            "resolved for; run `tokamake resolve` again"
        )
    if text := decide_schedule(start, run.train):
        print(text, flush=True)


def _has_architecture(start: Checkpoint | NativeCheckpoint, run: Run) -> bool:
    """Whether a checkpoint has a run's architecture, its parent's with other positions, or one of
    another family that can start it."""
    actual = start.architecture
    own = architecture_from(actual, run.architecture, source=start.path, stated="the resolved run")
    actual = own or actual
    if run.parent:
        actual = actual.with_positions_of(run.architecture)
    return run.architecture == actual


def describe_initial_checkpoint(run: Run) -> NativeCheckpoint:
    """Describe the checkpoint whose weights a run takes."""
    assert run.checkpoint is not None, "random weights are in no checkpoint"
    start = open_native(run.checkpoint)
    if not _has_architecture(start, run):
        raise UserError(
            f"{run.checkpoint}: not of the architecture that the run was resolved for; "
            "run `tokamake resolve` again"
        )
    return start


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
    """Settings that differ from a checkpoint, such as `NAME 0.001 -> 0.0003`."""
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

    Megatron counts lengths in samples; a step counts as the samples of a whole global batch.
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
    # Here, a share of the run need not be a whole number of steps; in Megatron, it is.
    if recorded > 1 and value > 1:
        return abs(recorded - value) < 1 or math.isclose(recorded, value, rel_tol=_REL_TOLERANCE)
    return math.isclose(recorded, value, rel_tol=_REL_TOLERANCE)
