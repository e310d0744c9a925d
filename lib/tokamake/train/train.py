"""The stage `train`: from a resolved run to a trained checkpoint, on one process or many.

Reads run.yaml. Writes the run's output folder and, last of all, train.json beside it.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tokamake.errors import UserError

if TYPE_CHECKING:
    import torch

    from tokamake.checkpoint.native.resume_state import ResumeState
    from tokamake.config.resolved_run import Run
    from tokamake.preflight.data import IndexContent
    from tokamake.runtime.ranks import Ranks
    from tokamake.train.checkpoints.resume import ResumePoint
    from tokamake.train.trainer import Job

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

    ranks = Ranks.find()
    with _exit_on_signals(ranks), joined(ranks) as device:
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
    from tokamake.train.checkpoints.resume import locked_output, starting_point
    from tokamake.train.checkpoints.summary import write_environment
    from tokamake.train.data_verification import verify_data
    from tokamake.train.hooks.heartbeat import watched
    from tokamake.train.numerics import deterministic_algorithms, with_precision
    from tokamake.train.startup_log import startup_log
    from tokamake.train.stopping.deadline import Deadline
    from tokamake.train.trainer import Job

    run = with_precision(run, device)
    with deterministic_algorithms(run.train.deterministic), watched(run, ranks) as heartbeat:
        with raise_on_all_ranks():
            index = read_index(run.index)
            check_run(run, index=index, world_size=ranks.world_size, device=device)
            check_until_step(run, until_step)

        # Rank 0 locks the output folder while training continues.
        find_start = partial(starting_point, run=run, ranks=ranks, index=index)
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
            with raise_on_all_ranks():
                ranks.print_once(startup_log(current, ranks, device=device, resumed=start.resumed))
                if ranks.rank == 0:
                    write_environment(run)
            verify_data(run, ranks, index, beat=heartbeat.beat)
            deadline = Deadline.of_job(run.output, ranks, minutes=minutes)
            job = Job(ranks, device, deadline, heartbeat)
            return train_run(run, job, index=index, start=start, until_step=until_step)


def train_run(
    run: "Run",
    job: "Job",
    *,
    index: "IndexContent",
    start: "ResumePoint",
    until_step: int | None = None,
) -> int:
    """Train a checked run from `start` to `until_step`, or to its end.

    Returns:
        Exit status: 0, or one of `Stopped` if steps are left.
    """
    from tokamake.train.objectives._base import objective_class
    from tokamake.train.trainer import Trainer

    sampler = objective_class(run).make_sampler(
        run, job.ranks, index=index, unvalidated=start.unvalidated
    )
    trainer = Trainer(run, job, sampler=sampler, start=start, until_step=until_step)
    state = trainer.train()
    if state.step < trainer.last_step:
        assert trainer.stopped
        return trainer.stopped
    _finish(trainer.run, job.ranks, state=state, step=trainer.last_step)
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


@contextmanager
def _exit_on_signals(ranks: "Ranks") -> Iterator[None]:
    """Exit on a signal while there is nothing to save.

    That is before the first step and after the last; in between, the trainer has its own handler.
    """
    from tokamake.runtime.exit_status import Stopped
    from tokamake.train.stopping.stopping import on_signals

    def stop(number: int, _: Any) -> NoReturn:
        name = signal.Signals(number).name
        if ranks.rank == 0:
            # Not print: the signal may interrupt one, and print cannot be nested.
            os.write(1, f"stopped by {name}; there was nothing to save\n".encode())
        os._exit(Stopped[name])

    with on_signals(stop):
        yield
