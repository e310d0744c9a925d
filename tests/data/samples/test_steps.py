"""Batches and steps for any number of ranks."""

from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokamake.config.batching import BatchSizes, Rampup
from tokamake.data.samples.steps import batches, steps
from tokamake.errors import UserError


class NumberedSamples:
    """Each sample is its own number."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, sample: int) -> np.ndarray:
        return np.array([sample])


SAMPLES = NumberedSamples(200)


@pytest.mark.parametrize("rank", [0, 1])
def test_batches_resume_and_end(rank: int) -> None:
    settings = {
        "micro_batch_size": 3,
        "data_parallel_rank": rank,
        "data_parallel_size": 2,
    }
    every = list(batches(SAMPLES, consumed_samples=0, **settings))
    assert len(every) == len(SAMPLES) // 6
    resumed = list(batches(SAMPLES, consumed_samples=30, **settings))
    np.testing.assert_array_equal(every[5:], resumed)
    assert not list(batches(SAMPLES, consumed_samples=len(SAMPLES), **settings))


@settings(max_examples=40)
@given(
    layouts=st.lists(
        st.tuples(st.integers(0, 6), st.integers(0, 2), st.integers(0, 12)), min_size=1, max_size=6
    ),
    ramps_up=st.booleans(),
)
def test_each_sample_comes_once_in_order_for_any_layouts(
    layouts: list[tuple[int, int, int]], ramps_up: bool
) -> None:
    """After some steps of each layout, a run continues with other ranks (at most 64) and rows."""
    sizes = BatchSizes(512, Rampup(256, 256, 2_000) if ramps_up else None)
    seen: list[int] = []
    for exponent, rows, number in layouts:
        ranks, micro_batch_size = 2**exponent, 2**rows
        of_ranks = [
            steps(
                NumberedSamples(7_000),
                sizes,
                consumed_samples=len(seen),
                micro_batch_size=micro_batch_size,
                data_parallel_rank=rank,
                data_parallel_size=ranks,
            )
            for rank in range(ranks)
        ]
        for together in islice(zip(*of_ranks, strict=True), number):
            (size,) = {step.global_batch_size for step in together}
            assert {step.consumed_samples for step in together} == {len(seen)}
            for blocks in zip(*(step.micro_batches for step in together), strict=True):
                assert {block.shape for block in blocks} == {(micro_batch_size, 1)}
                seen += np.concatenate(blocks)[:, 0].tolist()
            assert len(seen) == together[0].consumed_samples + size
            assert size == (256 if ramps_up and len(seen) - size < 2_000 else 512)
    assert seen == list(range(len(seen)))


def test_steps_whose_data_are_left_out_count_and_read_nothing() -> None:
    class Counting:
        """Samples that note which are read."""

        def __init__(self) -> None:
            self.read: list[int] = []

        def __len__(self) -> int:
            return len(SAMPLES)

        def __getitem__(self, sample: int) -> Any:
            self.read.append(sample)
            return SAMPLES[sample]

    sizes = BatchSizes(8, Rampup(4, 4, 12))  # steps begin at samples 0, 4, 8, 12, 20, 28
    options: Any = {"micro_batch_size": 2, "data_parallel_rank": 0, "data_parallel_size": 1}
    ranges = [(2, 3), (5, 5)]
    samples = Counting()
    every = [*islice(steps(SAMPLES, sizes, consumed_samples=0, **options), 6)]
    some = [*islice(steps(samples, sizes, consumed_samples=0, **options, left_out=ranges), 6)]
    assert [(step[0], step[1]) for step in some] == [(step[0], step[1]) for step in every]
    for number, (step, expected) in enumerate(zip(some, every, strict=True), 1):
        if number in (2, 3, 5):
            assert step.micro_batches == []
        else:
            np.testing.assert_array_equal(step.micro_batches, expected.micro_batches)
    assert samples.read == [*range(4), *range(12, 20), *range(28, 36)]
    # A run that resumes leaves out the same ones.
    resumed = steps(SAMPLES, sizes, consumed_samples=8, **options, left_out=ranges)
    assert [bool(step.micro_batches) for step in islice(resumed, 4)] == [False, True, False, True]


def test_steps_end_and_refuse_uneven_batches() -> None:
    settings = {"micro_batch_size": 3, "data_parallel_rank": 1, "data_parallel_size": 2}
    all_steps = list(steps(SAMPLES, BatchSizes(12), consumed_samples=0, **settings))
    assert len(all_steps) == len(SAMPLES) // 12
    assert [step.consumed_samples for step in all_steps] == list(range(0, 12 * len(all_steps), 12))
    np.testing.assert_array_equal(all_steps[1].micro_batches[0], [SAMPLES[n] for n in (15, 16, 17)])
    with pytest.raises(UserError, match="multiple of 6"):
        next(steps(SAMPLES, BatchSizes(10), consumed_samples=0, **settings))
