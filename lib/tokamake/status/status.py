"""The tool `status`: which stages are done, running and failed, and how training goes."""

import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokamake.units import duration

if TYPE_CHECKING:
    from tokamake.status.stages import Job
    from tokamake.status.training import TrainingProgress

_STATES = ("failed", "running", "done", "waiting")
_LAST_LINES = 5


def status(folder: Path = Path(), *, json: bool = False) -> None:
    """Tell how far a workflow has come, from its files alone.

    It may run on another machine that shares the disk, and need not run at all. A job counts as
    running as long as Snakemake's mark says so, also after Snakemake was killed: the time since its
    last word tells more. A stage that must be done again because its input changed counts as done.

    Args:
        folder: Where the workflow runs: the folder with results/ and logs/.
        json: Print one JSON object, for programs.

    Raises:
        UserError: there is no workflow.
    """
    from tokamake.errors import UserError
    from tokamake.status.stages import jobs, stages
    from tokamake.status.training import read_training

    if not any((folder / name).is_dir() for name in ("results", "logs")):
        raise UserError(
            f"{folder}: neither results nor logs in it; give the folder that Snakemake runs in"
        )
    now = time.time()
    found = {title: jobs(folder, wanted) for title, wanted in stages(folder).items()}
    trained = {
        title: training
        for title in found
        if title.startswith("run ")
        and (training := read_training(folder, title.removeprefix("run "), now=now))
    }
    if json:
        print(_as_json(folder, found, trained))
        return
    for title, each in found.items():
        print("\n".join([title, *_lines(each, trained.get(title))]))
    for each in found.values():
        for job in each:
            if job.state == "failed":
                print(f"failed: {job.stage.name}, {job.stage.log} ends with:")
                print("\n".join(f"  {line}" for line in _tail(folder / job.stage.log)))


def _lines(jobs: "list[Job]", training: "TrainingProgress | None") -> list[str]:
    """A line for each state that stages are in, and one on the training."""
    lines = []
    for state in _STATES:
        names = dict.fromkeys(job.stage.name for job in jobs if job.state == state)
        told = [_told(name, state, jobs) for name in names]
        if told:
            lines.append(f"  {state:8} {', '.join(told)}")
    return lines if training is None else [*lines, f"  training {_pace(training)}"]


def _told(name: str, state: str, jobs: "list[Job]") -> str:
    """A stage, with how many of its jobs are in a state, and when a running one last spoke."""
    of_stage = [job for job in jobs if job.stage.name == name]
    alike = [job for job in of_stage if job.state == state]
    count = f" {len(alike):,} of {len(of_stage):,}" if len(of_stage) > 1 else ""
    silent = [job.silent_seconds for job in alike if job.silent_seconds is not None]
    spoke = f" (last word {_ago(min(silent))})" if state == "running" and silent else ""
    return f"{name}{count}{spoke}"


def _pace(training: "TrainingProgress") -> str:
    """Where a run is, how fast, and how long it will take."""
    share = training.step / training.steps
    parts = [f"step {training.step:,} of {training.steps:,} ({share:.0%})"]
    if training.loss is not None:
        parts.append(f"loss {training.loss:.4f}")
    if training.validation_loss is not None:
        parts.append(f"validation {training.validation_loss:.4f}")
    parts += [f"{name} {loss:.4f}" for name, loss in training.validation_losses.items()]
    if training.tokens_per_second is not None:
        parts.append(f"{training.tokens_per_second:,.0f} tokens/s")
    if training.step < training.steps:
        left = training.seconds_left
        parts += [f"{duration(left)} left"] if left is not None else []
        parts.append(f"last line {_ago(training.silent_seconds)}")
    return ", ".join(parts)


def _ago(seconds: float) -> str:
    return f"{duration(round(max(seconds, 0)))} ago"


def _tail(log: Path) -> list[str]:
    """Last lines of a log that have anything in them."""
    try:
        text = log.read_text(encoding="utf-8", errors="replace")[-10_000:]
    except OSError:
        return ["(no log)"]
    return [line for line in text.splitlines() if line.strip()][-_LAST_LINES:]


def _as_json(
    folder: Path, found: "dict[str, list[Job]]", trained: "dict[str, TrainingProgress]"
) -> str:
    told: list[dict[str, Any]] = []
    for title, each in found.items():
        told += [
            {
                "group": title,
                "stage": job.stage.name,
                "product": job.stage.product,
                "log": job.stage.log,
                "state": job.state,
                "silent_seconds": job.silent_seconds,
                **({"last_lines": _tail(folder / job.stage.log)} if job.state == "failed" else {}),
            }
            for job in each
        ]
    training = {title.removeprefix("run "): value._asdict() for title, value in trained.items()}
    return json.dumps(_finite({"jobs": told, "training": training}), indent=2, allow_nan=False)


def _finite(value: Any) -> Any:
    """A value with null in the place of NaN and infinity, which JSON has not."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
