"""Kills at random instants: whatever is killed, and when, the run ends with the same checkpoint.

A kill falls anywhere from the start of the processes to their end: while they import, meet, load,
train, save or validate. A run that survived a kill is killed again, until it ends.
"""

import random
import time
from multiprocessing.connection import wait
from pathlib import Path

import pytest

from tests.support.faults import Inject
from tests.support.forked import Started, train
from tests.support.interrupted_runs import GRID, assert_same_end
from tests.support.ranks import kill
from tests.support.runs import make_run

NUM_KILLS = 4
"""Kills of each layout."""
LAYOUTS = [
    *("data", "context", "deepspeed", "deepspeed-3"),
    *("sharded-4", "tensor-data", "pipeline-tensor"),  # with all that two ranks can share
]


def killed_after(
    config: Path, seconds: float, *, ranks: int, victims: list[int], inject: Inject
) -> bool:
    """Train, and kill some ranks after a time; return whether the run ended before.

    Args:
        config: run.yaml.
        seconds: time from the start to the kill.
        ranks: number of ranks.
        victims: ranks that are killed; the others are killed as soon as one of them has ended.
        inject: counts a fault.
    """
    with Started(config, ranks=ranks) as started:
        if not wait([process.sentinel for process in started.processes], seconds):
            kill([started.processes[victim] for victim in victims])
        codes = started.ended()
    # The ranks may have ended before the signal came.
    has_ended = codes == [0] * ranks
    if not has_ended:
        inject()
        assert -9 in codes, f"exit codes {codes}\n{started.printed}"
    return has_ended


def assert_survives_kills(root: Path, layout: str, *, num_kills: int, inject: Inject) -> None:
    ranks, settings = GRID[layout]
    expected = make_run(root, f"whole-{layout}", **settings)
    began = time.monotonic()
    train(expected, ranks=ranks)
    seconds = time.monotonic() - began
    chance = random.Random(layout)
    num_killed = num_runs = 0
    while num_killed < num_kills:
        num_runs += 1
        config = make_run(root, f"killed-{layout}-{num_runs}", **settings)
        while num_killed < num_kills:
            victims = chance.choice([[chance.randrange(ranks)], [*range(ranks)]])
            instant = chance.uniform(0, seconds)
            if killed_after(config, instant, ranks=ranks, victims=victims, inject=inject):
                break
            num_killed += 1
        else:
            train(config, ranks=ranks)
        assert_same_end(config, expected)


@pytest.fixture(scope="module")
def _warm(root: Path) -> None:
    """The first run of a process takes longer: it waits for the server of the ranks."""
    train(make_run(root, "first", train_steps=1))


@pytest.mark.usefixtures("_warm")
@pytest.mark.grid
@pytest.mark.ranks
@pytest.mark.fault("kill at a random instant")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_killed_at_many_random_instants_ends_the_same(
    root: Path, inject: Inject, layout: str
) -> None:
    assert_survives_kills(root, layout, num_kills=NUM_KILLS, inject=inject)
