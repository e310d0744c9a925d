"""How far a training run is, from its metrics.jsonl: step, speed, losses, time left."""

import json
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from tokamake.config.resolved_run import read_run

_TAIL_BYTES = 1 << 20
_VALIDATION = "validation_loss"
"""What losses of validation sets begin with; the name of one follows after a slash."""
_LATEST = 20
"""Lines of which the speed is the median."""


class TrainingProgress(NamedTuple):
    """What a run tells of itself."""

    step: int
    """Steps done, as far as they are logged."""
    steps: int
    """Steps of the whole run."""
    loss: float | None
    """Last training loss, in nats per token."""
    validation_loss: float | None
    """Last validation loss."""
    validation_losses: dict[str, float]
    """Last ones of the other validation sets, by name."""
    tokens_per_second: float | None
    """Median of the last lines."""
    seconds_left: float | None
    """Steps left at the speed of the last lines; None: unknown yet."""
    silent_seconds: float
    """Time since the last line."""


def read_training(folder: Path, run: str, *, now: float) -> TrainingProgress | None:
    """Read how far a run is; None where it has not begun.

    Args:
        folder: where the workflow runs.
        run: name of the run.
        now: time in seconds, as time.time().
    """
    settings, metrics = folder / f"results/{run}/run.yaml", folder / f"results/{run}/training"
    path = metrics / "metrics.jsonl"
    if not settings.exists() or not path.exists():
        return None
    steps = read_run(settings).train.train_steps
    lines = _lines(path)
    trained = [line for line in lines if "loss" in line]
    latest = trained[-_LATEST:]
    step = latest[-1]["step"] if latest else 0
    losses = [(key, line[key]) for line in lines for key in line if key.startswith(_VALIDATION)]
    measured = {key.removeprefix(_VALIDATION).removeprefix("/"): loss for key, loss in losses}
    each = [line["step_seconds"] for line in latest if "step_seconds" in line]
    return TrainingProgress(
        step,
        steps,
        latest[-1]["loss"] if latest else None,
        measured.pop("", None),
        measured,
        median(line["tokens_per_second"] for line in latest) if latest else None,
        (steps - step) * median(each) if each else None,
        now - path.stat().st_mtime,
    )


def _lines(path: Path) -> list[dict[str, Any]]:
    """The last whole lines: months of training have millions."""
    with path.open("rb") as stream:
        stream.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        text = stream.read()
    whole = text[: text.rfind(b"\n") + 1].splitlines()
    return [json.loads(line) for line in whole[len(text) >= _TAIL_BYTES :]]
