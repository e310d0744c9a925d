"""The tool `benchmark-train`: speed of a run's training steps, and where their time goes."""

from pathlib import Path

from tokamake.errors import UserError


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
    validation and checkpoints. Prints tokens and floating-point operations per second, their share
    of the device's peak (MFU), times of steps and of their parts, and memory.

    Args:
        config: The run, as `tokamake resolve` writes it.
        steps: Steps to measure.
        warmup_steps: Steps before them that are not measured.
        synthetic: Train on random tokens instead of the run's samples; its index may be missing.
        peak_tflops: Peak of a rank's device in 10¹² operations per second; by default the
            peak of a known device, else the speed of a matrix product in the same precision.
        output: JSON file for all numbers.
    """
    from tokamake import files
    from tokamake.config.resolved_run import read_run
    from tokamake.runtime.process_group import joined
    from tokamake.runtime.rank_errors import leave, raise_on_all_ranks
    from tokamake.runtime.ranks import Ranks

    ranks = Ranks.find()
    with joined(ranks) as device:
        with raise_on_all_ranks():
            run = read_run(config)
            if steps < 1 or warmup_steps < 0:
                raise UserError(
                    f"--steps {steps} --warmup-steps {warmup_steps}: give 1 and 0 or more"
                )
        from tokamake.train.numerics import deterministic_algorithms
        from tokamake.train.trials import speed
        from tokamake.train.trials.trial_steps import TrialSteps

        with deterministic_algorithms(run.train.deterministic):
            total = warmup_steps + steps + speed.num_timed_steps(steps)
            trial = TrialSteps(run, ranks, device=device, num_steps=total, synthetic=synthetic)
            report = speed.measure(
                trial, ranks, device=device, steps=steps, warmup_steps=warmup_steps
            )
        report |= speed.utilization(
            report, trial.run, ranks=ranks, device=device, peak_tflops=peak_tflops
        )
        if ranks.rank == 0:
            print(speed.report(report))
            if output:
                files.write_json(output, report)
    leave(ranks, 0)
