"""What a run starts from: whether a checkpoint fits it, told before any tensor is read.

The workflow asks as it begins, `resolve` once more, and `train` of a checkpoint that it continues.
"""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokamake.checkpoint.tensors.checkpoint import Checkpoint
    from tokamake.config.architecture import Architecture
    from tokamake.config.optimization import OptimizerSettings
    from tokamake.config.resolved_run import Run
    from tokamake.config.training import TrainSettings

_ANEW = "set train.finetune to true to take its weights alone"
_WITHOUT_EFFECT = {"initializer_range"}
"""Of an architecture, on weights that are there."""


def open_start(
    checkpoint: Path, train: "TrainSettings", architecture: Path | None = None
) -> "Checkpoint":
    """Open a checkpoint of any format that a run shall start from; no tensor is read.

    Args:
        checkpoint: its folder, or one whose `latest` names it.
        train: settings of the run.
        architecture: file that says what the model should be; None: whatever it is.

    Raises:
        UserError: it is missing or damaged, it is of another architecture, or it cannot be
            continued with these settings.
    """
    from tokamake.checkpoint.detect import open_any

    found = open_any(checkpoint)
    if architecture:
        check_architecture(found, architecture)
    if train.finetune is False:
        check_continued(found, train)
    return found


def check_architecture(found: "Checkpoint", path: Path) -> None:
    """Compare a checkpoint with a file of config/models; a vocab_size left out fits any.

    Raises:
        UserError: they differ; it has a line a field.
    """
    from tokamake.config.architecture import read_architecture
    from tokamake.errors import UserError

    wanted, there = dict(read_architecture(path)), dict(found.architecture)
    names = wanted.keys() - _WITHOUT_EFFECT
    differ = [name for name in wanted if name in names and wanted[name] != there.get(name)]
    if wanted["vocab_size"] is None:
        differ.remove("vocab_size")
    if differ:
        lines = (f"{name}: checkpoint {there.get(name)}, config {wanted[name]}" for name in differ)
        raise UserError(
            f"{found.path}: is of another architecture than model.architecture says; name its "
            "file, or from_checkpoint\n" + "\n".join(f"{line} ({path})" for line in lines)
        )


def check_continued(found: "Checkpoint", train: "TrainSettings") -> None:
    """See that a run can go on where a checkpoint ends.

    Raises:
        UserError: optimizer states are missing, no step is left, or the batches were others.
    """
    from tokamake.errors import UserError

    _check_states(found, train.optimizer)
    step, consumed = found.progress.iteration, found.progress.consumed_samples
    last = train.num_steps
    if last is not None and step >= last:
        raise UserError(
            f"{found.path}: is at step {step:,} already, and the run ends at step {last:,}; raise "
            f"train.train_steps, or {_ANEW}"
        )
    if consumed != (expected := train.batch_sizes.samples(step)):
        raise UserError(
            f"{found.path}: has consumed {consumed:,} samples in {step:,} steps, with "
            f"train.global_batch_size and rampup_batch_size it would be {expected:,}; set these as "
            f"they were, or {_ANEW}"
        )


def _check_states(found: "Checkpoint", settings: "OptimizerSettings") -> None:
    """See that a checkpoint has the optimizer's states, no fewer and no others."""
    from tokamake.errors import UserError

    name = settings.name
    there = {key for key in found.source if key.startswith("optimizer.")}
    wanted = state_keys(found.architecture, settings)
    if wanted and not there:
        raise UserError(
            f"{found.path}: has no optimizer states of {name} to continue with; {_ANEW}"
        )
    if (saved := found.notes.get("optimizer", name)) != name:
        raise UserError(
            f"{found.path}: has optimizer states of {saved}, not of {name}; set "
            f"train.optimizer.name to {saved}, or {_ANEW}"
        )
    for some, told in ((wanted - there, "has no"), (there - wanted, f"{name} has no use for its")):
        if some:
            more = f" and {len(some) - 1} more" if len(some) > 1 else ""
            raise UserError(
                f"{found.path}: {told} {min(some)}{more}, so its optimizer was not {name}; set "
                f"train.optimizer.name as it was, or {_ANEW}"
            )


def state_keys(architecture: "Architecture", settings: "OptimizerSettings") -> set[str]:
    """Keys of the states that an optimizer has of a model after its first step."""
    import torch

    from tokamake import plugins
    from tokamake.checkpoint import model_tensors
    from tokamake.optim._groups import parameter_groups

    plug_in = plugins.load("optim", settings.name)
    # States depend on names and dimensions, so tiny parameters tell them.
    named = [
        (name, torch.nn.Parameter(torch.ones([2] * len(shape))))
        for name, shape in model_tensors.shapes(architecture).items()
    ]
    for _, parameter in named:
        parameter.grad = torch.ones_like(parameter)
    optimizer = plug_in.build(parameter_groups(named, 0.0), settings)
    if hasattr(optimizer, "train"):
        optimizer.train()
    optimizer.step()
    return {
        f"optimizer.{kind}.{name}"
        for name, parameter in named
        for kind in optimizer.state[parameter].keys() & plug_in.STATE
    }


def check_native(checkpoint: Path, found: "Checkpoint") -> None:
    """See that a checkpoint is tokamake's own, of which each rank reads its parts.

    Raises:
        UserError: it is not, and must be converted.
    """
    from tokamake.checkpoint.detect import title
    from tokamake.errors import UserError

    if found.format != "native":
        command = ("tokamake", "convert", "--from", checkpoint, "--to", f"{checkpoint}-native")
        raise UserError(
            f"{checkpoint}: is a checkpoint of {title(found.format)}, which training does not "
            f"read; convert it first: {shlex.join(map(str, command))} --format native"
        )


def check_begun(run: "Run") -> None:
    """See that the checkpoint which a run continues is what the run was resolved for.

    Raises:
        UserError: it is another one by now, or cannot be continued.
    """
    from tokamake.errors import UserError

    found = open_start(run.checkpoint, run.train)
    progress = found.progress
    there = found.architecture, progress.iteration, progress.consumed_samples
    if there != (run.architecture, run.step, run.consumed_samples):
        raise UserError(
            f"{run.checkpoint}: is not at the step or of the architecture that the run was "
            "resolved for; run `tokamake resolve` again"
        )
