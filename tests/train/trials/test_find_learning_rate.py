"""The learning-rate finder on curves with a known steepest descent."""

import numpy as np
import pytest

from tokamake.errors import UserError
from tokamake.train.trials.find_learning_rate import suggest, sweep


def curve(rates: list[float], steepest: float) -> np.ndarray:
    """A loss that falls from 10 to 4, fastest at `steepest`, and explodes at 100 times that."""
    logs = np.log10(np.array(rates) / steepest)
    return 4 + 6 / (1 + np.exp(4 * logs)) + np.exp(6 * (logs - 2))


def test_sweep_grows_by_equal_factors() -> None:
    rates = sweep(1e-6, 1.0, steps=7)
    assert rates == pytest.approx([1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0])


@pytest.mark.parametrize("steepest", [1e-5, 1e-3, 1e-2])
@pytest.mark.parametrize("steps", [50, 400])
def test_the_steepest_descent_is_found(steepest: float, steps: int) -> None:
    rates = sweep(1e-7, 10.0, steps=steps)
    suggestion = suggest(rates, curve(rates, steepest))
    assert abs(np.log10(suggestion / steepest)) < 0.2


def test_the_steepest_descent_may_be_at_the_end() -> None:
    rates = sweep(1e-6, 1e-3, steps=10)
    assert suggest(rates, [9.0] * 9 + [1.0]) == rates[-1]


def test_noise_hardly_changes_the_suggestion() -> None:
    rates = sweep(1e-7, 10.0, steps=400)
    random = np.random.default_rng(0)
    losses = [curve(rates, 1e-3) + random.normal(0, 0.3, 400) for _ in range(20)]
    suggestions = np.array([suggest(rates, each) for each in losses])
    assert np.abs(np.log10(suggestions / 1e-3)).max() < 0.6


def test_losses_after_divergence_are_ignored() -> None:
    rates = sweep(1e-7, 10.0, steps=100)
    losses = curve(rates, 1e-4)
    whole = suggest(rates, losses)
    losses[85:] = np.nan
    losses[90:] = -1e9
    assert suggest(rates, losses) == pytest.approx(whole)
    losses[84] = 1e30
    assert suggest(rates, losses) == pytest.approx(whole)


def test_curves_without_a_descent_are_refused() -> None:
    rates = sweep(1e-4, 1.0, steps=50)
    with pytest.raises(UserError, match=r"does not decrease between 0\.0001 and 1; start lower"):
        suggest(rates, np.linspace(1, 9, 50))
    with pytest.raises(UserError, match="9 finite losses before training diverged"):
        suggest(rates, [1.0] * 9 + [np.inf] * 41)
