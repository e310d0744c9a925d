"""Batch size ramp-up, compared with megatron-core's calculator."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.num_microbatches_calculator import RampupBatchsizeNumMicroBatchesCalculator

from tokamake.config.batching import BatchSizes, Rampup
from tokamake.errors import UserError


@given(
    start=st.integers(1, 9),
    increment=st.integers(1, 5),
    increments=st.integers(1, 30),
    samples=st.integers(1, 3000),
)
def test_sizes_equal_those_of_megatron(
    start: int, increment: int, increments: int, samples: int
) -> None:
    full = start + increments * increment
    megatron = RampupBatchsizeNumMicroBatchesCalculator(
        full, 1, 1, False, 1, start, increment, samples
    )
    sizes = BatchSizes(full, Rampup(start, increment, samples))
    consumed = 0
    while consumed <= samples + 2 * full:
        megatron.update(consumed, consistency_check=True)
        assert sizes.at(consumed) == megatron.current_global_batch_size
        consumed += sizes.at(consumed)
    assert sizes.at(consumed) == full


@given(
    start=st.integers(1, 9),
    increment=st.integers(1, 5),
    increments=st.integers(0, 8),
    samples=st.integers(0, 300),
    steps=st.integers(0, 99),
    offset=st.integers(0, 50),
)
def test_steps_and_samples_are_inverse(
    start: int, increment: int, increments: int, samples: int, steps: int, offset: int
) -> None:
    sizes = BatchSizes(start + increments * increment, Rampup(start, increment, samples))
    consumed = 0
    for _ in range(steps):
        consumed += sizes.at(consumed)
    assert sizes.samples(steps) == consumed
    row = min(offset, sizes.at(consumed) - 1)
    assert sizes.whole_steps(consumed + row) == steps
    assert sizes.step_and_row(consumed + row) == (steps, row)


def test_full_size_without_rampup() -> None:
    assert BatchSizes(8).at(0) == 8
    assert BatchSizes(8, Rampup(8, 3, 100)).at(5) == 8
    assert BatchSizes(8, Rampup(2, 3, 0)).at(0) == 8


@pytest.mark.parametrize(
    ("full", "ramp", "reason"),
    [
        (0, None, "global_batch_size: 0: give 1 or more"),
        (8, Rampup(3, 2, 9), "from 3 by 2 it never reaches global_batch_size 8"),
        (8, Rampup(9, 1, 9), "rampup_batch_size: 9 1 9: give a start up to"),
        (8, Rampup(0, 1, 9), "rampup_batch_size: 0 1 9"),
        (8, Rampup(2, 0, 9), "rampup_batch_size: 2 0 9"),
        (8, Rampup(2, 2, -1), "rampup_batch_size: 2 2 -1"),
    ],
)
def test_invalid_sizes_are_refused(full: int, ramp: Rampup | None, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        BatchSizes(full, ramp)


def test_ranks_need_whole_micro_batches() -> None:
    BatchSizes(12, Rampup(4, 4, 100)).check_micro_batches(2, 2)
    with pytest.raises(UserError, match=r"12 samples cannot be shared by 4 .*multiple of 8"):
        BatchSizes(12).check_micro_batches(2, 4)
    with pytest.raises(UserError, match="6 samples cannot be shared by 2"):
        BatchSizes(12, Rampup(6, 6, 100)).check_micro_batches(2, 2)


@pytest.mark.parametrize("first_sample", [0, 7, 30, 100])
def test_sizes_count_from_the_step_at_which_they_begin(first_sample: int) -> None:
    sizes = BatchSizes(16, Rampup(4, 4, 50), first_step=5, first_sample=first_sample)
    consumed = first_sample
    for step in range(5, 20):
        assert sizes.samples(step) == consumed
        assert sizes.whole_steps(consumed) == step
        consumed += sizes.at(consumed)
        assert sizes.whole_steps(consumed - 1) == step
    # The size of a step depends on the consumed samples alone.
    assert sizes.at(30) == BatchSizes(16, Rampup(4, 4, 50)).at(30)
