"""Checks for Adam's states in optimizers that have a single step count and learning rate."""

from tokamake.checkpoint.megatron_model.optimizer_states import MODEL
from tokamake.checkpoint.tensors.checkpoint import OPTIMIZER_SETTINGS, Checkpoint
from tokamake.config.optimization import zero_file_optimizers

MOMENTS = ("exp_avg", "exp_avg_sq")
_REQUIRED_SETTINGS = {
    "lr": "learning rate",
    "betas": "betas",
    "eps": "epsilon",
    "weight_decay": "weight decay",
}


def has_states(checkpoint: Checkpoint) -> bool:
    return any(key.startswith("optimizer.") for key in checkpoint.source)


def adam_problem(checkpoint: Checkpoint) -> str | None:
    """Return why Adam cannot resume from a checkpoint's states, or None if it can."""
    source = checkpoint.source
    states = {key for key in source if key.startswith("optimizer.")}
    names = [key.removeprefix(MODEL) for key in source if key.startswith(MODEL)]
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
