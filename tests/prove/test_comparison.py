"""Random compositions of everything that decides a step train as one process does.

`make test` proves 60 of them, which have each value of each axis; `make test-all` proves 1,000.
"""

from functools import cache

import pytest

from tests.support.compositions import (
    NOT_OF_A_STEP,
    SLOW,
    Composition,
    assert_proved,
    axes,
    drawn_compositions,
    learners,
    shrunk,
)
from tests.support.grids import cover
from tests.support.ranks import spawn
from tests.support.wrong_factors import FAULTS, prove_with
from tokamake import plugins
from tokamake.config.parallel import ParallelSettings
from tokamake.config.training import TrainSettings

NUM_CHUNKS, CHUNK = 40, 25
SECTIONS = {"parallel", "optimizer", "dropout", "objective"}
"""Sections of `train` whose settings are axes of their own."""


def test_each_setting_is_an_axis_or_is_named() -> None:
    names = {axis.partition(".")[0] for axis in axes()} | SECTIONS
    objectives = {*plugins.names("train/objectives/*/objective")}
    assert {*TrainSettings.model_fields} - objectives == names & {
        *TrainSettings.model_fields
    } | NOT_OF_A_STEP | SLOW
    for name in ParallelSettings.model_fields:
        assert f"parallel.{name}" in axes()


def test_each_family_learns_something() -> None:
    assert {family for family, _ in learners()} == {*plugins.names("models/*/model")}


@cache
def stratified() -> list[Composition]:
    """Compositions that have each value of each axis, family and objective."""
    drawn = [each for chunk in range(4) for each in drawn_compositions(chunk, CHUNK)]
    chosen = cover(drawn, lambda each: each.facts)
    rest = [each for each in drawn if each not in chosen]
    return chosen + rest[: 60 - len(chosen)]


@pytest.mark.ranks
@pytest.mark.parametrize("part", range(4))
def test_compositions_train_as_one_process(part: int) -> None:
    assert_proved(stratified()[part::4])


@pytest.mark.ranks
@pytest.mark.grid
@pytest.mark.parametrize("chunk", range(NUM_CHUNKS))
def test_a_thousand_compositions_train_as_one_process(chunk: int) -> None:
    assert_proved(drawn_compositions(chunk, CHUNK))


@pytest.mark.ranks
@pytest.mark.grid
@pytest.mark.parametrize("number", range(len(FAULTS)))
def test_a_wrong_factor_is_found(number: int) -> None:
    fault = FAULTS[number]
    (of_each,) = spawn(prove_numbered, fault.shown_by.world_size, number)[0]
    assert of_each, f"{fault.wrong} in {fault.function.__qualname__}"


def prove_numbered(number: int) -> list[list[str]]:
    return prove_with(FAULTS[number])


@pytest.mark.ranks
@pytest.mark.grid
def test_without_faults_the_same_compositions_are_proved() -> None:
    assert_proved([fault.shown_by for fault in FAULTS])


SENSITIVE = [
    Composition(2, "qwen3", "causal", values, 5685)
    for values in (
        {
            "optimizer.name": "lion",
            "micro_batch_size": 3,
            "architecture.num_hidden_layers": 8,
            "architecture.tie_word_embeddings": True,
            **{f"dropout.{name}": 0.1 for name in ("hidden", "attention", "embedding")},
        },
        {"optimizer.name": "muon", "architecture.num_hidden_layers": 8, "zero_stage": 3},
    )
]
"""Runs whose optimizers turn rounding of gradients into larger changes of weights."""


@pytest.mark.ranks
@pytest.mark.grid
def test_rounding_is_no_difference() -> None:
    assert_proved(SENSITIVE)


def test_a_composition_that_fails_is_shown_in_its_smallest_form() -> None:
    drawn = next(
        each
        for each in drawn_compositions(1, CHUNK)
        if each.value("parallel.tensor_parallel_size") == 2 and len(each.values) > 4
    )
    smallest = shrunk(drawn, lambda each: each.value("parallel.tensor_parallel_size") == 2)
    assert smallest.values == {"parallel.tensor_parallel_size": 2}
    assert smallest.world_size == 2 * drawn.data_parallel_size
