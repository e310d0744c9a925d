"""The objective causal: the label of a token is the next token."""

import numpy as np

from tokamake.data.samples.loader import PAD
from tokamake.parallel.loss import NO_LABEL
from tokamake.train.objectives.causal.objective import inputs_and_labels

BATCH = np.arange(24).reshape(4, 6)


def test_the_label_of_a_token_is_the_next_token() -> None:
    inputs, labels = inputs_and_labels(BATCH)
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
