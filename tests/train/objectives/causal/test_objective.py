"""The objective causal: the label of a token is the next token."""

from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids

from tokamake.data.samples.loader import PAD
from tokamake.parallel.loss import NO_LABEL
from tokamake.train.objectives.causal.objective import (
    Objective,
    further_tokens,
    inputs_and_labels,
    packed,
)

EOD = 0
BATCH = np.arange(24).reshape(4, 6)


def test_the_label_of_a_token_is_the_next_token() -> None:
    inputs, labels = inputs_and_labels(BATCH)
    run: Any = None  # no setting decides the shape
    assert Objective(run).label_shape(BATCH) == labels.shape
    np.testing.assert_array_equal(inputs, BATCH[:, :-1])
    np.testing.assert_array_equal(labels, BATCH[:, 1:])


def test_filled_up_rows_and_masked_tokens_have_no_label() -> None:
    rows = np.array([[5, 0, 6, PAD, PAD, PAD], [8, 8, 8, 8, 8, 0]])
    before = rows.copy()
    mask = np.array([[True, False, True, True, True], [True] * 5])
    inputs, labels = inputs_and_labels(rows, mask)
    assert inputs.tolist() == [[5, 0, 6, 0, 0], [8] * 5]
    none = [NO_LABEL] * 4
    assert labels.tolist() == [[0, *none], [8, 8, 8, 8, 0]]
    np.testing.assert_array_equal(rows, before)


def attention_mask(document_ids: np.ndarray) -> np.ndarray:
    """(B, L, L) true where token i attends to token j: not after it, in the same document."""
    same = document_ids[:, :, None] == document_ids[:, None, :]
    return same & np.tri(document_ids.shape[1], dtype=bool)


@pytest.mark.parametrize("flags", range(8))
def test_masks_and_positions_equal_megatron(flags: int) -> None:
    rng = np.random.default_rng(flags)
    options = {
        "reset_position_ids": bool(flags & 1),
        "reset_attention_mask": bool(flags & 2),
        "eod_mask_loss": bool(flags & 4),
    }
    rows = rng.integers(0, 4, (50, 18))
    rows[0], rows[1] = EOD, 1  # only end-of-document tokens, and none
    samples = packed(rows, eod=EOD, **options)
    assert [array.dtype for array in samples] == [bool, np.int64, np.int32]
    visible = attention_mask(samples.document_ids)
    for row in range(len(rows)):
        hidden, loss_mask, position_ids = _get_ltor_masks_and_position_ids(
            torch.from_numpy(rows[row, :-1]), EOD, *options.values(), create_attention_mask=True
        )
        np.testing.assert_array_equal(samples.loss_mask[row], loss_mask.numpy() == 1)
        np.testing.assert_array_equal(samples.position_ids[row], position_ids)
        np.testing.assert_array_equal(visible[row], ~hidden[0].numpy())


def test_documents_are_numbered_within_a_row() -> None:
    rows = np.array([[5, EOD, 6, 6, EOD, 7], [EOD, 8, 8, 8, 8, 8]])
    samples = packed(rows, eod=EOD, reset_attention_mask=True)
    assert samples.document_ids.tolist() == [[0, 0, 1, 1, 1], [0, 1, 1, 1, 1]]
    assert not packed(rows, eod=EOD).document_ids.any()


@pytest.mark.parametrize("eod_mask_loss", [False, True])
def test_padding_has_no_loss(eod_mask_loss: bool) -> None:
    rows = np.array([[5, EOD, 6, PAD, PAD, PAD], [8, 8, 8, 8, 8, EOD]])
    before = rows.copy()
    samples = packed(rows, eod=EOD, eod_mask_loss=eod_mask_loss, reset_attention_mask=True)
    after_end = not eod_mask_loss
    assert samples.loss_mask.tolist() == [[True, after_end, False, False, False], [True] * 5]
    # Padding does not end a document.
    assert samples.document_ids.tolist() == [[0, 0, 1, 1, 1], [0] * 5]
    np.testing.assert_array_equal(rows, before)


@pytest.mark.parametrize("flags", range(4))
def test_further_labels_stay_in_their_document_and_row(flags: int) -> None:
    rng = np.random.default_rng(flags)
    rows = np.where(rng.random((6, 13)) < 0.2, EOD, rng.integers(1, 90, (6, 13)))
    rows[4, 7:] = rows[5, 2:] = PAD
    options = {"reset_attention_mask": bool(flags & 1), "eod_mask_loss": bool(flags & 2)}
    masks = packed(rows, eod=EOD, **options)
    _, labels = inputs_and_labels(rows, masks.loss_mask)
    ids = masks.document_ids if options["reset_attention_mask"] else None
    tokens, further = further_tokens(rows, labels, number=3, document_ids=ids)
    for row, place, k in np.ndindex(6, 12, 3):
        seen = range(place + 1, place + k + 2)  # tokens that the layer's input has beside the state
        inside = seen[-1] <= 12
        token = max(rows[row, seen[-1]], 0) if inside else 0
        assert tokens[row, place, k] == token
        has_label = seen[-1] + 1 <= 12 and rows[row, seen[-1] + 1] != PAD
        if has_label and flags:
            # Each token before the label is no end of a document, or the label may be the next one.
            crossed = {"eod_mask_loss": [place, *seen], "reset_attention_mask": [place, *seen][:-1]}
            for name, places in crossed.items():
                if options[name]:
                    has_label &= EOD not in rows[row, places]
        label = rows[row, seen[-1] + 1] if has_label else NO_LABEL
        assert further[row, place, k] == label
    assert (further != NO_LABEL).any()
