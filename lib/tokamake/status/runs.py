"""Training progress of a run from its metrics.jsonl, and its origin: data folder and parent."""

import re
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from tokamake import files
from tokamake.checkpoint.native.resume_state import newest_state, run_since_change
from tokamake.config.data_set import DataSet
from tokamake.config.resolved_run import read_run
from tokamake.data.indexed.manifest import read_manifest
from tokamake.data.indexed.paths import manifest_path
from tokamake.errors import UserError
from tokamake.status.jobs import data_set_of
from tokamake.train import metrics
from tokamake.train.hooks.stragglers import read_slow
from tokamake.units import duration

_TAIL_BYTES = (1 << 15, 1 << 20)
"""Bytes at the end of the metrics that are read; the second if the first have no validation."""
_VALIDATION = "validation_loss"
"""Prefix of the keys of validation losses; the name of a split follows after a slash."""
_METRIC = "validation_"
"""Prefix of the keys of other measurements of validations."""
_STEPS = re.compile(r"^train:\n(?:  .*\n)*?  train_steps: (\d+)$", re.MULTILINE)
"""Steps of a run.yaml as `resolve` writes it."""
_LATEST = 20
"""Number of last lines for the median speed."""


class TrainingProgress(NamedTuple):
    """Progress of a run."""

    step: int
    """Last logged step."""
    steps: int
    """Steps of the whole run."""
    loss: float | None
    """Last training loss, in nats per token."""
    validation_loss: float | None
    validation_losses: dict[str, float]
    """Name of another validation split → its last loss."""
    validation_metrics: dict[str, float]
    """Last accuracies of the validation split `valid`, by name."""
    tokens_per_second: float | None
    """Median of the last training lines."""
    seconds_left: float | None
    """Remaining seconds at the current speed; None: not yet known."""
    silent_seconds: float
    """Seconds since the last line."""
    slow_ranks: list[str]
    """Slow ranks, with host and reason."""
    losses: list[float]
    """Training losses of the lines that were read, the latest last."""
    flops_per_second: float | None
    """Model FLOPs a second of the whole run, a median as tokens_per_second."""
    mfu: float | None
    """Share of the devices' peak, a median, too; None: the peak is not known."""
    line_seconds: float | None
    """Usual time between two lines."""


def read_training(folder: Path, run: str, *, now: float) -> TrainingProgress | None:
    """Read the progress of a run; None if it has not begun."""
    settings = folder / f"results/{run}/run.yaml"
    path = folder / f"results/{run}/training" / metrics.FILE
    if not settings.exists() or not path.exists():
        return None
    steps = _num_steps(settings, path.parent)
    lines = _lines(path)
    latest = [line for line in lines if "loss" in line][-_LATEST:]
    step = latest[-1]["step"] if latest else 0
    losses = [(key, line[key]) for line in lines for key in line if key.startswith(_VALIDATION)]
    last_losses = {key.removeprefix(_VALIDATION).removeprefix("/"): loss for key, loss in losses}
    step_seconds = [line["step_seconds"] for line in latest if "step_seconds" in line]
    return TrainingProgress(
        step,
        steps,
        latest[-1]["loss"] if latest else None,
        last_losses.pop("", None),
        last_losses,
        {
            key.removeprefix(_METRIC): value
            for line in lines
            for key, value in line.items()
            if key.startswith(_METRIC) and not key.startswith(_VALIDATION) and "/" not in key
        },
        median(line["tokens_per_second"] for line in latest) if latest else None,
        (steps - step) * median(step_seconds) if step_seconds else None,
        now - path.stat().st_mtime,
        read_slow(path.parent),
        [line["loss"] for line in lines if "loss" in line],
        median(line.get("model_flops_per_second", 0) for line in latest) or None
        if latest
        else None,
        median(shares) if (shares := [line["mfu"] for line in latest if "mfu" in line]) else None,
        _line_seconds(latest),
    )


def saved_step(folder: Path, run: str) -> int | None:
    """Step of the checkpoint from which a run would continue; None: there is none."""
    try:
        name = (folder / f"results/{run}/training/latest").read_text().strip()
        return int(name.removeprefix("global_step"))
    except (OSError, ValueError):
        return None


def _line_seconds(latest: list[dict[str, Any]]) -> float | None:
    """Median time between two lines of metrics."""
    gaps = [
        (after["step"] - before["step"]) * after["step_seconds"]
        for before, after in pairwise(latest)
        if "step_seconds" in after
    ]
    return median(gaps) if gaps else None


def described(training: TrainingProgress) -> str:
    """Step, losses and speed of a run, and its remaining time, on one line."""
    share = training.step / training.steps
    parts = [f"step {training.step:,} of {training.steps:,} ({share:.0%})"]
    if training.loss is not None:
        parts.append(f"loss {training.loss:.4f}")
    if training.validation_loss is not None:
        text = metrics.metrics_text(training.validation_metrics)
        parts.append(f"validation {training.validation_loss:.4f}" + f" ({text})" * bool(text))
    parts += [f"{name} {loss:.4f}" for name, loss in training.validation_losses.items()]
    if training.tokens_per_second is not None:
        parts.append(f"{training.tokens_per_second:,.0f} tokens/s")
    if training.step < training.steps and training.seconds_left is not None:
        parts.append(f"{duration(training.seconds_left)} left")
    return ", ".join(parts)


def _num_steps(settings: Path, output: Path) -> int:
    """Steps of a run; a change of the batch size gives it another number of them."""
    try:
        state, _ = newest_state(output)
    except UserError:  # no checkpoint yet, or a damaged one
        state = None
    has_changed = state is not None and bool(state.lineage)
    # The settings of hundreds of runs take seconds to check, and only one of them counts.
    text = "" if has_changed else settings.read_text(encoding="utf-8", errors="replace")
    if stated := _STEPS.search(text):
        return int(stated[1])
    run = read_run(settings)
    return (run_since_change(run, state) if state else run).train.train_steps


def _lines(path: Path) -> list[dict[str, Any]]:
    """Read the last lines only: months of training have millions of lines."""
    text = b""
    for size in _TAIL_BYTES:
        with path.open("rb") as stream:
            stream.seek(max(0, path.stat().st_size - size))
            text = stream.read()
        if len(text) < size:
            break
        text = text[text.find(b"\n") + 1 :]  # the first line may be cut
        if _VALIDATION.encode() in text:
            break
    records: list[dict[str, Any]] = []
    for record in metrics.parse(text)[0]:
        if all(isinstance(value, int | float) for value in record.values()):
            records.append(record)
    return records


class Origin(NamedTuple):
    """Data folder and parent of a run."""

    data_set: str
    replaced: list[str]
    """Datasets that have been written with other content since the run was indexed."""
    parent: str | None
    """Run of the same table that it starts from."""


def read_origin(folder: Path, run: str) -> Origin:
    parent = None
    with suppress(UserError):  # there is no run.yaml yet
        parent = read_run(folder / f"results/{run}/run.yaml").parent
    data_set = data_set_of(folder, run)
    return Origin(data_set.name, _replaced_datasets(folder, run, data_set=data_set), parent)


def _replaced_datasets(folder: Path, run: str, *, data_set: DataSet) -> list[str]:
    """Prefixes of the datasets that have other content than the run's sample index names."""
    index = folder / f"results/{run}/index/index.json"
    if not index.is_file():
        return []
    indexed_at, data = index.stat().st_mtime_ns, folder / data_set.folder
    replaced = []
    for prefix, pair in files.read_json(index, "rerun the workflow").get("pairs", {}).items():
        path = manifest_path(data / prefix)
        # Manifests that are older than the index are not read: there may be thousands.
        if path.is_file() and path.stat().st_mtime_ns > indexed_at:
            with suppress(UserError):  # damaged: the workflow writes it again
                if read_manifest(data / prefix)["sha256"] != pair["sha256"]:
                    replaced.append(prefix)
    return replaced
