"""The tool `find-learning-rate`: a sweep of learning rates over a run's first steps."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from tokamake.errors import UserError

if TYPE_CHECKING:
    from tokamake.train.trials.trial_steps import TrialSteps

_MAX_ROWS = 20
"""Lines of the printed curve."""
_DIVERGENCE = 4.0
"""The sweep ends at a loss of this many times the lowest loss."""


def find_learning_rate(
    *,
    config: Path,
    steps: int = 100,
    start: Annotated[float, Parameter(name="--from")] = 1e-7,
    end: Annotated[float, Parameter(name="--to")] = 1.0,
    output: Path | None = None,
) -> None:
    """Suggest a learning rate: where the loss falls fastest while the rate grows at each step.

    Trains from the run's first weights on its first samples, with a new optimizer, on one rank or
    several, as `train` does. Does not touch the run's output folder.

    Args:
        config: The run, as `tokamake resolve` writes it.
        steps: Steps of the sweep, each with a larger rate; it ends early if training diverges.
        start: Learning rate of the first step.
        end: Learning rate of the last step.
        output: JSON file for the suggestion and the curve.
    """
    from tokamake import files
    from tokamake.config.resolved_run import read_run
    from tokamake.runtime.process_group import process_group
    from tokamake.runtime.rank_errors import leave, raise_on_all_ranks, report_from_rank_0
    from tokamake.runtime.ranks import Ranks
    from tokamake.schedules._finder import FEWEST, suggest, sweep

    ranks = Ranks.find()
    with report_from_rank_0(ranks), process_group(ranks) as device:
        with raise_on_all_ranks():
            run = read_run(config)
            if not 0 < start < end:
                raise UserError(f"--from {start:g} --to {end:g}: give 0 < from < to")
            if steps < FEWEST:
                raise UserError(f"--steps {steps}: give {FEWEST} or more")
        from tokamake.train.numerics import deterministic_algorithms
        from tokamake.train.trials.trial_steps import TrialSteps

        with deterministic_algorithms(run.train.deterministic):
            trial = TrialSteps(run, ranks, device=device, num_steps=steps)
            rates = sweep(start, end, steps=steps)
            losses = measure(trial, rates)
        suggestion = suggest(rates[: len(losses)], losses)
        if ranks.rank == 0:
            print(curve(rates, losses))
            print(f"suggested train.optimizer.learning_rate: {suggestion:.2e}")
            if output:
                value = {"suggestion": suggestion, "rates": rates[: len(losses)], "losses": losses}
                files.write_json(output, value)
    leave(ranks, 0)


def measure(trial: "TrialSteps", rates: list[float]) -> list[float]:
    """Loss before the update of each step of a sweep; fewer than rates if training diverges."""
    from math import isfinite

    from tokamake.schedules import Schedule

    weight_decay = Schedule(trial.run.train).weight_decay(0, 0)
    losses: list[float] = []
    for rate, rows in zip(rates, trial.batches(), strict=False):
        loss = trial.train_step(rows, learning_rate=rate, weight_decay=weight_decay).loss
        if not isfinite(loss):
            break
        losses.append(loss)
        if loss > _DIVERGENCE * min(losses):
            break
    return losses


def curve(rates: list[float], losses: list[float]) -> str:
    """Rates and losses as a short table."""
    stride = -(-len(losses) // _MAX_ROWS)
    shown = zip(rates[::stride], losses[::stride], strict=False)
    return "\n".join(["   rate      loss", *(f"{rate:.2e}  {loss:8.4f}" for rate, loss in shown)])
