"""The stage `plan-segments`: where the jobs of a run end, if the data decide its length."""

from pathlib import Path

from tokamake import files
from tokamake.config.resolved_run import read_run
from tokamake.errors import UserError


def plan_segments(*, config: Path, segment_steps: int, output: Path) -> None:
    """Plan the jobs of a run whose length comes from epochs: write the last step of each.

    Args:
        config: The run, as `resolve` writes it.
        segment_steps: Steps of each job; the last job has the remaining steps.
        output: JSON file: `num_steps` of the whole run, and in `segments` the steps at which its
            jobs end, except the last one.
    """
    run = read_run(config)
    if segment_steps < 1:
        raise UserError(f"--segment-steps {segment_steps}: give 1 or more")
    train = run.train.model_copy(update={"segment_steps": segment_steps})
    ends = train.segments(run.step)
    files.write_json(output, {"num_steps": train.num_steps, "segments": ends})
    print(f"{output}: {train.num_steps:,} steps in {len(ends) + 1:,} jobs")
