"""Adam's states as optimizers have them that know one step and one rate for all parameters."""

from tokamake.checkpoint.deepspeed.zero_reader import MODEL
from tokamake.checkpoint.tensors.checkpoint import OPTIMIZER_SETTINGS, Checkpoint
from tokamake.config.model import ADAMS

MOMENTS = ("exp_avg", "exp_avg_sq")
_NEEDED = {
    "lr": "learning rate",
    "betas": "betas",
    "eps": "epsilon",
    "weight_decay": "weight decay",
}


def unfit(checkpoint: Checkpoint) -> str | None:
    """Why such an optimizer could not continue with a checkpoint's states, if it could not.

    Args:
        checkpoint: with states.
    """
    source = checkpoint.source
    states = {key for key in source if key.startswith("optimizer.")}
    names = [key.removeprefix(MODEL) for key in source if key.startswith(MODEL)]
    wanted = {f"optimizer.{kind}.{name}" for kind in ("step", *MOMENTS) for name in names}
    optimizer = checkpoint.notes.get("optimizer", "adamw")
    if states != wanted or optimizer not in ADAMS:
        kinds = ", ".join(sorted({key.split(".")[1] for key in states}))
        return f"has states {kinds} of {optimizer}, not those of Adam of each parameter"
    steps = {source.number(f"optimizer.step.{name}") for name in names}
    if len(steps) > 1:
        return f"has parameters that were updated {min(steps):,.0f} to {max(steps):,.0f} times"
    known = checkpoint.notes.get(OPTIMIZER_SETTINGS, {})
    if missing := [told for name, told in _NEEDED.items() if name not in known]:
        return f"does not tell its optimizer's {', '.join(missing)}"
    return None
