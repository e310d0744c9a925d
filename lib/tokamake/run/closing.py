"""Last lines of `tokamake run`: what was built, or what is saved."""

import time
from contextlib import suppress
from pathlib import Path

from tokamake.config.data_set import RUN
from tokamake.errors import UserError
from tokamake.run.stages import Stages
from tokamake.runtime.console import counted
from tokamake.status.runs import read_training
from tokamake.units import duration

_RESULTS = Path("results")


def interrupted(runs: list[str], *, again: str) -> str:
    """Sentence about saved steps after a stop on request, and the command that continues."""
    saved = []
    for run in runs:
        with suppress(OSError, UserError, ValueError):
            from tokamake.checkpoint.native.resume_state import newest_state

            state, _ = newest_state(_RESULTS / run / "training")
            training = read_training(Path(), run, now=time.time())
            if state and training:
                saved.append(f"run {run} is saved at step {state.step:,} of {training.steps:,}")
    kept = f"finished jobs are kept{''.join(f', {each}' for each in saved)}"
    return f"stopped: {kept}; continue: {again}"


def summary(stages: Stages, *, config: Path, seconds: float) -> list[str]:
    """At most five lines: results, model, report, time, next command."""
    made = [*stages.outputs]
    runs = [run for run in stages.runs if Path(RUN.format(run=run), "train.json").is_file()]
    lines = _run_lines(runs) if runs else []
    if reports := [path for path in made if Path(path).name == "report.html"]:
        lines.append(f"report      {reports[-1]}: open it in a browser")
    lines.append(f"time        {duration(seconds)} for {counted(stages.num_done, 'job')}")
    following = f"serve {RUN.format(run=runs[0])}/training" if runs else f"run {config} train"
    lines.append(f"next        tokamake {following}")
    return lines


def _run_lines(names: list[str]) -> list[str]:
    """Results of the best run, and where its model is."""
    from tokamake import results

    frame = results.runs(*(RUN.format(run=name) for name in names))
    best = frame.sort_values(["validation_loss", "last_loss"], kind="stable").iloc[0]
    several = f", the best of {len(names)} runs" if len(names) > 1 else ""
    numbers = {
        "loss": best["last_loss"],
        "validation loss": best["validation_loss"],
        "perplexity": best["perplexity"],
    }
    # A missing value is not equal to itself.
    texts = [f"{name} {value:.4g}" for name, value in numbers.items() if value == value]
    export = Path(RUN.format(run=best["run"]), "export")
    exported = f", {export} for transformers" if export.is_dir() else ""
    return [
        f"run         {best['run']}{several}: {', '.join(texts)} at step {best['step']:,}",
        f"model       {best['checkpoint']}{exported}",
    ]
