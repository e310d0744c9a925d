"""The stage `finetune`: train a prepared run on its task, on one process or many."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from tokamake.finetune.finetune_run import FinetuneRun
    from tokamake.runtime.ranks import Ranks


def finetune(*, config: Path, output: Path, model: Path, minutes: float | None = None) -> None:
    """Finetune a model on a task, or resume a run that was interrupted.

    Start it alone or on several ranks, as `train`. After each epoch, the model is scored on the
    validation files; the checkpoint of the best epoch is kept. After any interruption, the same
    command resumes from the last checkpoint, with the same result, and one of a finished run only
    writes its results again. A run whose settings, rows or pretrained weights have changed is
    refused, unless `train.on_change` is restart. A stop signal, the end of the job and a file
    `stop` work as in `train`.

    Args:
        config: The run, as `tokamake prepare-finetune` writes it.
        output: JSON file to write: scores of each epoch, and the best one.
        model: Folder to write, with the checkpoint of the best epoch.
        minutes: Time limit; by default, the scheduler's limit for the job.
    """
    from tokamake.finetune.finetune_run import read_finetune_run
    from tokamake.runtime.process_group import joined
    from tokamake.runtime.rank_errors import leave, raise_on_all_ranks
    from tokamake.runtime.ranks import Ranks
    from tokamake.train.stopping.stopping import exit_on_signals

    ranks = Ranks.find()
    with exit_on_signals(ranks), joined(ranks) as device:
        with raise_on_all_ranks():
            run = read_finetune_run(config)
        code = finetune_run(run, ranks, device=device, output=output, model=model, minutes=minutes)
    leave(ranks, code)


def finetune_run(
    run: "FinetuneRun",
    ranks: "Ranks",
    *,
    device: "torch.device",
    output: Path,
    model: Path,
    minutes: float | None = None,
) -> int:
    """Train a run, all ranks in one process group; arguments as in `finetune`.

    Returns:
        Exit status: 0, or one of `Stopped` if steps are left.
    """
    from tokamake.finetune.results import write_results
    from tokamake.finetune.start import finetune_resume_point, read_data
    from tokamake.preflight.run import check_on_ranks
    from tokamake.runtime.rank_errors import raise_on_all_ranks
    from tokamake.train.checkpoints.resume import locked_output
    from tokamake.train.hooks.heartbeat import watched
    from tokamake.train.numerics import with_precision
    from tokamake.train.stopping.deadline import Deadline
    from tokamake.train.train import run_trainer
    from tokamake.train.trainer import Job, Trainer

    with raise_on_all_ranks():
        data = read_data(run, say=ranks.print_once)
        resolved = with_precision(run.resolved(len(data.train)), device)
        check_on_ranks(resolved, world_size=ranks.world_size, device=device)

    def finish(trainer: Trainer) -> None:
        with raise_on_all_ranks():
            if ranks.rank == 0:
                write_results(run, trainer, output=output, model=model)

    find_start = partial(finetune_resume_point, run=run, resolved=resolved, data=data, ranks=ranks)
    with (
        watched(resolved, ranks) as heartbeat,
        locked_output(resolved, ranks, find_start=find_start, beat=heartbeat.beat) as start,
    ):
        deadline = Deadline.of_job(run.output, ranks, minutes=minutes)
        job = Job(ranks, device, deadline, heartbeat)
        make_sampler = partial(data.make_sampler, resolved, ranks)
        return run_trainer(resolved, job, make_sampler=make_sampler, start=start, finish=finish)
