"""The tool `find-learning-rate`: a sweep of learning rates over a run's first steps.

Smith 2015, arXiv 1506.01186, section 3.3; the suggestion is the point of steepest descent, as in
fastai.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import numpy.typing as npt
from cyclopts import Parameter

from tokamake.errors import UserError

if TYPE_CHECKING:
    from tokamake.train.trials.trial_steps import TrialSteps

_SMOOTHING = 0.05
"""Standard deviation of the Gaussian that smooths losses, as a share of the sweep."""
FEWEST = 10
"""Minimum number of steps for a suggestion."""
_MAX_ROWS = 20
"""Lines of the printed curve."""
_DIVERGENCE = 4.0
"""The sweep ends at a loss of this many times the lowest loss."""

Floats = npt.NDArray[np.float64]


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
    from tokamake.runtime.process_group import joined
    from tokamake.runtime.rank_errors import leave, raise_on_all_ranks
    from tokamake.runtime.ranks import Ranks

    ranks = Ranks.find()
    with joined(ranks) as device:
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

    from tokamake.schedules._schedule import Schedule

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


def sweep(start: float, end: float, *, steps: int) -> list[float]:
    """Learning rate of each step of the sweep, from `start` to `end` by equal factors."""
    return [float(rate) for rate in np.geomspace(start, end, steps)]


def suggest(rates: Sequence[float], losses: Sequence[float]) -> float:
    """Learning rate at which the smoothed loss falls fastest.

    The slope is d loss / d log(rate), up to the minimum of the loss. Smoothing uses a Gaussian
    centered on each point, so it does not move the curve to higher rates.

    Args:
        losses: training loss of each step; ignored from the first one that is not finite.

    Raises:
        UserError: there are too few steps, or the loss does not fall.
    """
    finite = np.isfinite(np.asarray(losses, dtype=np.float64))
    count = len(losses) if finite.all() else int(np.argmin(finite))
    if count < FEWEST:
        raise UserError(
            f"learning-rate finder: {count} finite losses before training diverged; {FEWEST} or "
            "more are needed: start lower or take more steps"
        )
    logs = np.log(np.asarray(rates[:count], dtype=np.float64))
    smooth = _smooth(np.asarray(losses[:count], dtype=np.float64), _SMOOTHING * len(losses))
    lowest = int(np.argmin(smooth))
    if lowest == 0:
        raise UserError(
            f"learning-rate finder: the loss does not decrease between {rates[0]:g} and "
            f"{rates[count - 1]:g}; start lower"
        )
    slopes = np.gradient(smooth, logs)[: lowest + 1]
    return float(rates[int(np.argmin(slopes))])


def _smooth(values: Floats, width: float) -> Floats:
    """Smooth values with a Gaussian of standard deviation `width`, truncated at the ends.

    Values are clipped to twice the first losses; otherwise, exploding losses at the end of a sweep
    would affect earlier points.
    """
    values = np.minimum(values, 2 * np.median(values[: max(1, len(values) // 10)]))
    steps = np.arange(len(values))
    weights = np.exp(-0.5 * ((steps[:, None] - steps) / max(width, 1e-9)) ** 2)
    smooth: Floats = weights @ values / weights.sum(axis=1)
    return smooth
