"""The stage `train`: from a resolved run to a trained checkpoint, on one process or many.

Reads run.yaml. Writes the run's output folder and, last of all, train.json beside it.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tokamake.errors import UserError

if TYPE_CHECKING:
    import torch

    from tokamake.checkpoint.native.resume_state import ResumeState
    from tokamake.config.resolved_run import Run
    from tokamake.runtime.ranks import Ranks
    from tokamake.train.checkpoints.resume import ResumePoint
    from tokamake.train.sampler import Sampler
    from tokamake.train.trainer import Job, Trainer

_MAX_MINUTES = 1e6
"""Two years: a longer job has no end."""


def train(
    *,
    config: Path,
    until_step: int | None = None,
    until_samples: int | None = None,
    until_tokens: int | None = None,
    minutes: float | None = None,
) -> None:
    """Train a model, or resume a run that was interrupted.

    Start it alone or on several ranks: `torchrun --nproc-per-node 2 -m tokamake train --config
    run.yaml`, or through mpiexec or srun. After any interruption, the same command resumes from the
    last checkpoint, with the same result. On SIGTERM, SIGUSR1 or Ctrl-C, before the time of its job
    ends, and when a file `stop` appears in the output folder, a run saves a checkpoint and exits
    with a status of 80 or more (torchrun makes it 1), because it is not finished: only a finished
    run has a train.json. A second Ctrl-C ends it at once.

    Args:
        config: The run, as `tokamake resolve` writes it.
        until_step: Stop at this step, with a checkpoint and train.STEP.json; default: its end.
        until_samples: Stop at this number of consumed samples, rounded down to a whole step.
        until_tokens: Stop at this number of consumed tokens, rounded down to a whole step.
        minutes: Time limit; by default, the limit that Slurm, or the executor for PBS, gives
            the job.
    """
    from tokamake.config.resolved_run import read_run
    from tokamake.preflight.changes import read_decision
    from tokamake.runtime.process_group import joined
    from tokamake.runtime.rank_errors import leave, raise_on_all_ranks
    from tokamake.runtime.ranks import Ranks
    from tokamake.train.stopping.stopping import exit_on_signals

    ranks = Ranks.find()
    with exit_on_signals(ranks), joined(ranks) as device:
        with raise_on_all_ranks():
            run = read_decision(config, read_run(config))
            _check_limits(until_step, until_samples, until_tokens)
            _check_minutes(minutes)
        if until_tokens is not None:
            until_samples = until_tokens // run.train.sequence_length
        code = start_run(
            run,
            ranks,
            device=device,
            until_step=until_step,
            until_samples=until_samples,
            minutes=minutes,
        )
    leave(ranks, code)


def start_run(
    run: "Run",
    ranks: "Ranks",
    *,
    device: "torch.device",
    until_step: int | None = None,
    until_samples: int | None = None,
    minutes: float | None = None,
) -> int:
    """Check a run, lock its output folder and train it; all ranks call this together.

    It ends at `until_step`, or at the last whole step of `until_samples` consumed samples; None:
    at the end of the run. `minutes` is the time of this job; None: its scheduler knows it.

    Returns:
        Exit status: 0, or one of `Stopped` if steps are left.
    """
    # Imported late: torch's distributed modules take seconds.
    from tokamake.checkpoint.native.resume_state import run_since_change
    from tokamake.data.samples.index_folder import read_index
    from tokamake.preflight.run import check_run, check_until_step, step_of_samples
    from tokamake.runtime.rank_errors import raise_on_all_ranks
    from tokamake.train.checkpoints.resume import locked_output, resume_point
    from tokamake.train.data_verification import verify_data
    from tokamake.train.hooks.heartbeat import watched
    from tokamake.train.index_sampler import IndexSampler
    from tokamake.train.numerics import with_precision
    from tokamake.train.stopping.deadline import Deadline
    from tokamake.train.trainer import Job

    run = with_precision(run, device)
    with watched(run, ranks) as heartbeat:
        with raise_on_all_ranks():
            index = read_index(run.index)
            check_run(run, index=index, world_size=ranks.world_size, device=device)
            check_until_step(run, until_step)

        # Rank 0 locks the output folder while training continues.
        find_start = partial(resume_point, run=run, ranks=ranks, index=index)
        with locked_output(run, ranks, find_start=find_start, beat=heartbeat.beat) as start:
            with raise_on_all_ranks():
                current = run_since_change(run, start.state)
                if until_samples is not None:
                    until_step = step_of_samples(current, until_samples)
                check_until_step(current, until_step)
            state, last = start.state, current.train.train_steps
            if state.step >= (until_step or last) and not start.unvalidated:
                place = f"step {state.step}" + ", the last" * (state.step == last)
                ranks.print_once(f"{run.output}: already at {place}; nothing to train")
                _finish(current, ranks, state=state, step=until_step or last)
                return 0

            def make_sampler() -> IndexSampler:
                verify_data(run, ranks, index, beat=heartbeat.beat)
                return IndexSampler(run, ranks, index=index, unvalidated=start.unvalidated)

            deadline = Deadline.of_job(run.output, ranks, minutes=minutes)
            job = Job(ranks, device, deadline, heartbeat)
            return run_trainer(
                run,
                job,
                make_sampler=make_sampler,
                start=start,
                until_step=until_step,
                finish=lambda trainer: _finish(
                    trainer.run, ranks, state=trainer.state, step=trainer.last_step
                ),
            )


def run_trainer(
    run: "Run",
    job: "Job",
    *,
    make_sampler: "Callable[[], Sampler]",
    start: "ResumePoint",
    finish: Callable[["Trainer"], None],
    until_step: int | None = None,
) -> int:
    """Train a checked run from `start` to `until_step`, or to its end.

    Args:
        make_sampler: opens the samples of the run; all ranks call it together.
        finish: writes the results once the last step is trained; all ranks call it.

    Returns:
        Exit status: 0, or one of `Stopped` if steps are left.
    """
    from tokamake.checkpoint.native.resume_state import run_since_change
    from tokamake.runtime.rank_errors import raise_on_all_ranks
    from tokamake.train.checkpoints.summary import write_environment
    from tokamake.train.numerics import deterministic_algorithms
    from tokamake.train.startup_log import startup_log
    from tokamake.train.trainer import Trainer

    current, ranks = run_since_change(run, start.state), job.ranks
    if start.state.step < current.train.train_steps or start.unvalidated:
        with raise_on_all_ranks():
            log = startup_log(current, ranks, device=job.device, resumed=start.resumed)
            ranks.print_once(log)
            if ranks.rank == 0:
                write_environment(run)
    with deterministic_algorithms(run.train.deterministic):
        trainer = Trainer(run, job, sampler=make_sampler(), start=start, until_step=until_step)
        trainer.train()
    if trainer.state.step < trainer.last_step:
        assert trainer.stopped
        return trainer.stopped
    finish(trainer)
    return 0


def _finish(run: "Run", ranks: "Ranks", *, state: "ResumeState", step: int) -> None:
    """Write train.json, or train.STEP.json: the workflow then knows that the run is at this step.

    Args:
        state: newest state of the run; it may be past the step.
    """
    from tokamake.preflight.run import check_updated
    from tokamake.runtime.rank_errors import raise_on_all_ranks
    from tokamake.train.checkpoints.resume import state_at
    from tokamake.train.checkpoints.summary import write_summary

    check_updated(run, step=state.step, updates=state.updates)
    with raise_on_all_ranks():
        if ranks.rank == 0:
            write_summary(run, state_at(run.output, step, state=state))


def _check_minutes(minutes: float | None) -> None:
    if minutes is not None and not 0 < minutes < _MAX_MINUTES:
        raise UserError(f"--minutes {minutes:g}: give the minutes of this job, above 0")


def _check_limits(*limits: int | None) -> None:
    if sum(limit is not None for limit in limits) > 1:
        raise UserError("--until-step, --until-samples and --until-tokens: give one of them")
