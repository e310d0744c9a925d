"""The proofs of layouts see what is wrong."""

import copy

import pytest
import torch

from tests.support.layouts import RankResults
from tests.support.proofs import difference

WEIGHTS = {"a": torch.linspace(1, 2, 6).reshape(2, 3), "b": torch.ones(2)}
EXPECTED = {
    "losses": [2.0, 1.0],
    "norms": [1.0, 0.5],
    "validation": 2.0,
    "gradients": [WEIGHTS, WEIGHTS],
    "weights": WEIGHTS,
}


def of_rank(rank: int) -> RankResults:
    """Half of the matrix, and all of the vector."""
    parts = [
        ("a", torch.Size((2, 3)), (slice(rank, rank + 1), slice(0, 3)), WEIGHTS["a"][[rank]]),
        ("b", torch.Size((2,)), (slice(0, 2),), WEIGHTS["b"]),
    ]
    own = (copy.deepcopy(parts) for _ in range(3))  # else deepcopy keeps them one
    return copy.deepcopy(EXPECTED) | {"gradients": [next(own), next(own)], "weights": next(own)}


@pytest.fixture
def ranks() -> list[RankResults]:
    return [of_rank(0), of_rank(1)]


def test_equal_training_has_no_difference(ranks: list[RankResults]) -> None:
    assert not difference(ranks, EXPECTED)


@pytest.mark.parametrize("key", ["losses", "norms"])
def test_every_step_of_every_rank_counts(ranks: list[RankResults], key: str) -> None:
    ranks[1][key][1] *= 1 + 2e-5
    assert difference(ranks, EXPECTED).startswith(key)


def test_validation_counts(ranks: list[RankResults]) -> None:
    ranks[1]["validation"] = torch.nan
    assert difference(ranks, EXPECTED).startswith("validation")


def test_every_element_of_the_weights_counts(ranks: list[RankResults]) -> None:
    ranks[1]["weights"][0][-1][0, 1] += 1e-4  # of the largest, 2
    assert not difference(ranks, EXPECTED)
    ranks[1]["weights"][0][-1][0, 1] += 2e-4
    assert difference(ranks, EXPECTED).startswith("weights: a differs")


@pytest.mark.parametrize(("update", "norm"), [(0, 2.0), (1, WEIGHTS["a"].norm().item())])
def test_every_gradient_of_every_update_counts(
    ranks: list[RankResults], update: int, norm: float
) -> None:
    *_, row = ranks[1]["gradients"][update][0]
    row[0, 1] += 0.8e-5 * norm
    assert not difference(ranks, EXPECTED)
    row[0, 1] += 0.4e-5 * norm
    assert difference(ranks, EXPECTED).startswith(f"gradients of update {update}: a differs")


def test_ranks_must_agree_and_hold_everything(ranks: list[RankResults]) -> None:
    assert "no rank has all of ['a']" in difference(ranks[:1], EXPECTED)
    ranks[0]["gradients"][0][1][-1][0] += 1e-7
    assert "b: ranks differ" in difference(ranks, EXPECTED)
    for rank in ranks:
        del rank["gradients"][0][1]
    assert "gradients of update 0: shapes" in difference(ranks, EXPECTED)
