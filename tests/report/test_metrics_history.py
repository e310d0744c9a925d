"""Metrics of a run, and the checkpoint that they say is the best."""

from pathlib import Path

import numpy as np
import pytest

from tokamake.report.metrics_history import MetricsHistory, best_checkpoint


def history(losses: dict[int, float]) -> MetricsHistory:
    steps, values = np.array([*losses], float), np.array([*losses.values()], float)
    return MetricsHistory({}, {"valid": (steps, values)} if losses else {}, {}, {})


@pytest.mark.parametrize(
    ("losses", "kept", "best"),
    [
        ({2: 3.0, 4: 1.0, 6: 2.0}, (2, 4, 6), 4),
        ({2: 3.0, 4: 1.0, 6: 2.0}, (2, 6), 6),
        ({2: 1.0, 4: 2.0, 6: 1.0}, (2, 4, 6), 6),
        ({2: 1.0}, (4, 6), 6),
        ({}, (4, 6), 6),
    ],
    ids=["lowest", "lowest of the kept", "later of equals", "none validated", "no validation"],
)
def test_the_best_checkpoint_has_the_lowest_loss(
    tmp_path: Path, losses: dict[int, float], kept: tuple[int, ...], best: int
) -> None:
    for step in kept:
        (tmp_path / f"global_step{step}").mkdir()
    chosen = best_checkpoint(history(losses), tmp_path / "global_step6")
    assert chosen == tmp_path / f"global_step{best}"
