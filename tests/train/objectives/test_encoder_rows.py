"""Samples of a micro batch share rows: where their tokens lie."""

import numpy as np
import pytest
import torch

from tokamake.parallel.document_mask import positions_in_documents
from tokamake.train.objectives._encoder_rows import one_per_row, pack


@pytest.mark.parametrize("seed", range(20))
def test_each_token_lies_in_one_place_beside_those_of_its_sample(seed: int) -> None:
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, 17, 12), generator.integers(1, 9, 12)
    packings = pack(lengths, [16, 8])
    rows_by_stack = []
    for packing, own, row_length in zip(packings, lengths, (16, 8), strict=True):
        assert packing.shape[1] == row_length
        tokens = generator.integers(1, 100, (12, row_length))
        packed = packing.rows(tokens, padding=0)
        ids = packing.sample_ids
        positions = positions_in_documents(torch.from_numpy(ids)).numpy()
        assert packed.shape == ids.shape == packing.shape
        for sample, length in enumerate(own):
            row, start = divmod(int(packing.places[sample]), row_length)
            place = np.s_[row, start : start + length]
            np.testing.assert_array_equal(packed[place], tokens[sample, :length])
            assert (ids[place] == sample).all()
            assert positions[place].tolist() == [*range(length)]
        assert ((packed == 0) == (ids == 12)).all()
        assert (ids < 12).sum() == own.sum()
        # Padding comes last, and samples in the order of their numbers.
        assert (np.diff(ids, axis=1) >= 0).all()
        rows_by_stack.append(packing.places // row_length)
        numbers = np.flatnonzero(np.arange(row_length) < own[:, None])
        chosen = packed.flatten()[packing.places_of(numbers, row_length)]
        np.testing.assert_array_equal(chosen, tokens.flatten()[numbers])
    np.testing.assert_array_equal(*rows_by_stack)


def test_long_samples_come_first_so_that_short_ones_fill_rows() -> None:
    (packing,) = pack([np.array([4, 10, 6, 12, 4, 12])], [16])
    assert packing.shape == (3, 16)
    assert packing.sample_ids.tolist() == [
        [0] * 4 + [3] * 12,
        [4] * 4 + [5] * 12,
        [1] * 10 + [2] * 6,
    ]


def test_a_row_for_each_sample_can_be_longer_than_it() -> None:
    packing = one_per_row(2, 3, row_length=4)
    values = np.array([[5, 6, 7], [8, 9, 10]])
    assert packing.rows(values, padding=-100).tolist() == [[5, 6, 7, -100], [8, 9, 10, -100]]
    assert packing.places_of(np.array([0, 2, 4]), 3).tolist() == [0, 2, 5]
