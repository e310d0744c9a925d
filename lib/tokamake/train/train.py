"""The stage `train`: from a resolved run to a trained checkpoint, on one process or many.

Reads run.yaml; writes the run's output folder and, last of all, train.json beside it.
"""

from pathlib import Path


def train(*, config: Path) -> None:
    """Train a model, or go on where an interrupted run has stopped.

    Start it alone or on several ranks: `torchrun --nproc-per-node 2 -m tokamake train --config
    run.yaml`, or through mpiexec or srun. The same command continues after any interruption, at the
    last checkpoint and with the same result. Asked to stop by SIGTERM, a run saves a checkpoint and
    exits with code 75 (EX_TEMPFAIL; torchrun makes it 1), for it is not finished; train.json is
    written at the end only.

    Args:
        config: The run, as `tokamake resolve` writes it.

    Raises:
        UserError: the run cannot start or its loss is not finite.
    """
    from tokamake import runtime
    from tokamake.config import read_run

    ranks = runtime.Ranks.find()
    with runtime.one_voice(ranks), runtime.process_group(ranks) as device:
        with runtime.same_fate():
            run = read_run(config)
        from tokamake.train.loop import train_run

        code = train_run(run, ranks, device)
    runtime.leave(ranks, code)
