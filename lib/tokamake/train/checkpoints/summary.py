"""The summary of a run or of a segment, beside the output folder: train.json or train.STEP.json."""

import platform
from importlib.metadata import version
from pathlib import Path

from tokamake import files
from tokamake.checkpoint.native.resume_state import ResumeState
from tokamake.config.resolved_run import Run
from tokamake.train import metrics


def summary_path(run: Run, step: int) -> Path:
    """File that says that a run has reached a step: train.json for the last one."""
    middle = "" if step == run.train.train_steps else f".{step}"
    return run.output.with_name(f"train{middle}.json")


def write_summary(run: Run, state: ResumeState) -> None:
    """Write where a run stands at a checkpoint, and its metrics until then."""
    tokens = state.consumed_samples * run.train.sequence_length
    # Without the tokens of another run that this one continues.
    run_tokens = tokens - run.consumed_samples * run.train.sequence_length
    records = metrics.read(run.output / metrics.FILE)
    files.write_json(
        summary_path(run, state.step),
        {
            "run": run.run,
            "digest": state.digest,
            "step": state.step,
            **metrics.summary([record for record in records if record["step"] <= state.step]),
            "consumed_samples": state.consumed_samples,
            "consumed_tokens": tokens,
            "seconds": state.seconds,
            "tokens_per_second": run_tokens / state.seconds if state.seconds else 0.0,
            "checkpoint": str(run.output / f"global_step{state.step}"),
            "world_size": state.world_size,
            "versions": {
                "python": platform.python_version(),
                **{name: version(name) for name in ("tokamake", "torch", "deepspeed")},
            },
        },
    )
