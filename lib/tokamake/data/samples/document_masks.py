"""Loss mask, positions and document numbers that keep the documents of a row apart.

Rows of tokens come from `loader`; the trainer takes the result. The rules are from Megatron's
get_ltor_masks_and_position_ids: a document begins after an end-of-document token.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokamake.data.samples.loader import PAD


class DocumentMasks(NamedTuple):
    """Model inputs for a batch of B samples of S tokens."""

    loss_mask: npt.NDArray[np.bool_]
    """(B, S) true where the loss counts."""
    position_ids: npt.NDArray[np.int64]
    """(B, S) position of each token in its row or in its document."""
    document_ids: npt.NDArray[np.int32]
    """(B, S) number of the document within the row; a token attends only to its own document."""


def packed(
    rows: npt.NDArray[np.int64],
    *,
    eod: int,
    reset_position_ids: bool = False,
    reset_attention_mask: bool = False,
    eod_mask_loss: bool = False,
) -> DocumentMasks:
    """Return the loss mask, positions and document numbers, separating documents if requested.

    `rows` (B, S + 1) are tokens; a label `PAD` has no loss. `eod_mask_loss`: no loss where the
    input is `eod`, since the next document is unpredictable.
    """
    tokens = rows[:, :-1]
    ends = tokens == eod
    begins = np.zeros(tokens.shape, bool)
    begins[:, 1:] = ends[:, :-1]
    position_ids = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    if reset_position_ids:
        first = np.where(begins, position_ids, 0)
        position_ids = position_ids - np.maximum.accumulate(first, axis=1)
    document_ids = np.zeros(tokens.shape, np.int32)
    if reset_attention_mask:
        document_ids = begins.cumsum(axis=1, dtype=np.int32)
    loss_mask = ~ends if eod_mask_loss else np.ones(tokens.shape, bool)
    padding = rows == PAD
    if padding.any():
        loss_mask = loss_mask & ~padding[:, 1:]
    return DocumentMasks(loss_mask, position_ids, document_ids)
