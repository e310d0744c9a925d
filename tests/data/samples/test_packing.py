"""Documents that share a row: positions and masks against megatron-core's."""

import numpy as np
import pytest
import torch
from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids

from tokamake.data.samples.loader import PAD
from tokamake.data.samples.packing import attention_mask, packed, sequence_bounds

EOD = 0


@pytest.mark.parametrize("flags", range(8))
def test_equal_megatron(flags: int) -> None:
    rng = np.random.default_rng(flags)
    chosen = {
        "reset_position_ids": bool(flags & 1),
        "reset_attention_mask": bool(flags & 2),
        "eod_mask_loss": bool(flags & 4),
    }
    rows = rng.integers(0, 4, (50, 18))
    rows[0], rows[1] = EOD, 1  # nothing but ends, and none
    made = packed(rows, eod=EOD, **chosen)
    assert [part.dtype for part in made] == [bool, np.int64, np.int32]
    seen = attention_mask(made.document_ids)
    for row in range(len(rows)):
        hidden, loss_mask, position_ids = _get_ltor_masks_and_position_ids(
            torch.from_numpy(rows[row, :-1]), EOD, *chosen.values(), create_attention_mask=True
        )
        np.testing.assert_array_equal(made.loss_mask[row], loss_mask.numpy() == 1)
        np.testing.assert_array_equal(made.position_ids[row], position_ids)
        np.testing.assert_array_equal(seen[row], ~hidden[0].numpy())


def test_sequence_bounds() -> None:
    rows = np.array([[5, EOD, 6, 6, EOD, 7], [EOD, 8, 8, 8, 8, 8]])
    made = packed(rows, eod=EOD, reset_attention_mask=True)
    assert made.document_ids.tolist() == [[0, 0, 1, 1, 1], [0, 1, 1, 1, 1]]
    bounds = sequence_bounds(made.document_ids)
    assert bounds.dtype == np.int32
    assert bounds.tolist() == [0, 2, 5, 6, 10]
    whole = packed(rows, eod=EOD)
    assert sequence_bounds(whole.document_ids).tolist() == [0, 5, 10]


@pytest.mark.parametrize("eod_mask_loss", [False, True])
def test_nothing_is_learned_where_there_is_no_token(eod_mask_loss: bool) -> None:
    rows = np.array([[5, EOD, 6, PAD, PAD, PAD], [8, 8, 8, 8, 8, EOD]])
    before = rows.copy()
    made = packed(rows, eod=EOD, eod_mask_loss=eod_mask_loss, reset_attention_mask=True)
    after_end = not eod_mask_loss
    assert made.loss_mask.tolist() == [[True, after_end, False, False, False], [True] * 5]
    # What fills up is no end of a document, even where that is token 0.
    assert made.document_ids.tolist() == [[0, 0, 1, 1, 1], [0] * 5]
    np.testing.assert_array_equal(rows, before)
