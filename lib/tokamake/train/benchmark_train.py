"""The tool `benchmark-train`: how fast a run's steps are at its layout, and where time goes."""

from pathlib import Path


def benchmark_train(
    *,
    config: Path,
    steps: int = 20,
    warmup_steps: int = 5,
    synthetic: bool = False,
    peak_tflops: float | None = None,
    output: Path | None = None,
) -> None:
    """Measure the speed of a run's training steps; nothing of the run is written.

    Trains from the run's first weights, on one rank or several, as `train` does, but without
    validation and checkpoints. Prints tokens and floating-point operations per second, the share of
    the device's peak that these are (MFU), times of steps and what they are spent on, and memory.

    Args:
        config: The run, as `tokamake resolve` writes it.
        steps: Steps that are measured.
        warmup_steps: Steps before them that are not.
        synthetic: Train on random tokens instead of the run's samples; its index may be missing.
        peak_tflops: Peak of a rank's device in 10¹² operations per second; by default that of a
            known device, else what a matrix product of the same number format reaches.
        output: File for all numbers, as JSON.

    Raises:
        UserError: the run cannot start, or has too few samples.
    """
    from tokamake import files
    from tokamake.config.resolved_run import read_run
    from tokamake.errors import UserError
    from tokamake.runtime.process_group import process_group
    from tokamake.runtime.rank_errors import leave, raise_on_all_ranks, report_from_rank_0
    from tokamake.runtime.ranks import Ranks

    ranks = Ranks.find()
    with report_from_rank_0(ranks), process_group(ranks) as device:
        with raise_on_all_ranks():
            run = read_run(config)
            if steps < 1 or warmup_steps < 0:
                raise UserError(
                    f"--steps {steps} --warmup-steps {warmup_steps}: give 1 and 0 or more"
                )
        from tokamake.train import speed
        from tokamake.train.numerics import deterministic_algorithms
        from tokamake.train.trial_steps import TrialSteps

        with deterministic_algorithms(run.train.deterministic):
            total = warmup_steps + steps + speed.split_steps(steps)
            trial = TrialSteps(run, ranks, device, num_steps=total, synthetic=synthetic)
            found = speed.measure(trial, ranks, device, steps=steps, warmup_steps=warmup_steps)
        found |= speed.utilization(found, trial.run, ranks, device, peak_tflops=peak_tflops)
        if ranks.rank == 0:
            print(speed.report(found))
            if output:
                files.write_json(output, found)
    leave(ranks, 0)
