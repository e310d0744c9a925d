"""Random weights do not depend on who draws which part of them."""

import hashlib
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.families import SHAPE
from tests.support.paths import ROOT
from tokamake.config.architecture import Architecture
from tokamake.config.architecture_files import read_architecture
from tokamake.models.common.random_weights import Array, RandomWeights, Slices

WIDE = Architecture(**{**SHAPE, "hidden_size": 1056})
ENDS = ("o_proj.weight", "down_proj.weight")
NAME, TALL = "model.layers.0.mlp.up_proj.weight", (700, 512)


def draw(name: str, shape: tuple[int, ...], place: Slices, *, seed: int = 3) -> Array:
    weights = RandomWeights(WIDE, seed, into_residual=ENDS)
    drawn = np.full([at.stop - at.start for at in place], np.nan, np.float32)
    for at, values in weights.tiles(name, shape, place=place):
        drawn[at] = values
    return drawn


def whole(shape: tuple[int, ...]) -> Slices:
    return tuple(slice(0, size) for size in shape)


WHOLE = draw(NAME, TALL, whole(TALL))


@given(st.data())
def test_a_part_has_the_numbers_of_the_whole(data: st.DataObject) -> None:
    place = tuple(
        slice(*sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size)))))
        for size in TALL
    )
    assert np.array_equal(draw(NAME, TALL, place), WHOLE[place])


def test_tiles_are_independent() -> None:
    """No two tiles begin with the same numbers, and neighbours are not correlated."""
    corners = WHOLE[::256, ::256]
    assert len({*corners.flatten().tolist()}) == corners.size == 3 * 2
    tiles = [WHOLE[:256, :256], WHOLE[256:512, :256], WHOLE[:256, 256:512]]
    for first, second in pairwise(tiles):
        assert abs(np.corrcoef(first.flatten(), second.flatten())[0, 1]) < 0.02
    assert not np.array_equal(WHOLE, draw(NAME.replace("up", "gate"), TALL, whole(TALL)))
    assert not np.array_equal(WHOLE, draw(NAME, TALL, whole(TALL), seed=4))


def test_numbers_do_not_change_between_versions() -> None:
    """A run that was interrupted by an update still starts from the same weights."""
    assert hashlib.sha256(WHOLE.tobytes()).hexdigest()[:16] == "ea91fa34d61c2645"


def test_norms_are_one_and_biases_zero() -> None:
    assert (draw("model.norm.weight", (9,), (slice(2, 5),)) == [1, 1, 1]).all()
    assert (draw("model.layers.0.mlp.up_proj.bias", (9,), (slice(2, 5),)) == [0, 0, 0]).all()


@pytest.mark.parametrize("rank", [0, 5])
def test_the_memory_of_a_rank_does_not_grow_with_the_model(rank: int) -> None:
    """A rank of eight draws its columns of a matrix of GPT-3 175B, 2.4 GB in all."""
    gpt3 = read_architecture(ROOT / "config/models/gpt3-175b.yaml")
    hidden, inner = gpt3.hidden_size, gpt3.intermediate_size
    columns = slice(rank * inner // 8, (rank + 1) * inner // 8)
    weights = RandomWeights(gpt3, 1, into_residual=ENDS)
    tiles = weights.tiles(
        "model.layers.7.mlp.down_proj.weight", (hidden, inner), place=(slice(96, 160), columns)
    )
    tracemalloc.start()
    num_drawn = sum(values.size for _, values in tiles)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert num_drawn == 64 * inner // 8
    assert peak < 2**20
