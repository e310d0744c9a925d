"""The proofs of layouts see what is wrong."""

import copy

import pytest
import torch
from layouts import Found
from proofs import difference

WEIGHTS = {"a": torch.linspace(1, 2, 6).reshape(2, 3), "b": torch.ones(2)}
EXPECTED = {"losses": [2.0, 1.0], "norms": [1.0, 0.5], "validation": 2.0} | dict.fromkeys(
    ("gradients", "weights"), WEIGHTS
)


def of_rank(rank: int) -> Found:
    """Half of the matrix, and all of the vector."""
    parts = [
        ("a", torch.Size((2, 3)), (slice(rank, rank + 1), slice(0, 3)), WEIGHTS["a"][[rank]]),
        ("b", torch.Size((2,)), (slice(0, 2),), WEIGHTS["b"]),
    ]
    own = {"gradients": copy.deepcopy(parts), "weights": copy.deepcopy(parts)}
    return copy.deepcopy(EXPECTED) | own


@pytest.fixture
def founds() -> list[Found]:
    return [of_rank(0), of_rank(1)]


def test_equal_training_has_no_difference(founds: list[Found]) -> None:
    assert not difference(founds, EXPECTED)


@pytest.mark.parametrize("key", ["losses", "norms"])
def test_every_step_of_every_rank_counts(founds: list[Found], key: str) -> None:
    founds[1][key][1] *= 1 + 2e-5
    assert difference(founds, EXPECTED).startswith(key)


def test_validation_counts(founds: list[Found]) -> None:
    founds[1]["validation"] = torch.nan
    assert difference(founds, EXPECTED).startswith("validation")


@pytest.mark.parametrize(("key", "most"), [("gradients", 1e-5), ("weights", 1e-4)])
def test_every_element_counts(founds: list[Found], key: str, most: float) -> None:
    founds[1][key][0][-1][0, 1] += most  # of the largest, 2
    assert not difference(founds, EXPECTED)
    founds[1][key][0][-1][0, 1] += 2 * most
    assert difference(founds, EXPECTED).startswith(f"{key}: a differs")


def test_ranks_must_agree_and_hold_everything(founds: list[Found]) -> None:
    assert "no rank has all of ['a']" in difference(founds[:1], EXPECTED)
    founds[0]["gradients"][1][-1][0] += 1e-7
    assert "b: ranks differ" in difference(founds, EXPECTED)
    for found in founds:
        del found["gradients"][1]
    assert "gradients: shapes" in difference(founds, EXPECTED)
