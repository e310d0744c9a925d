"""Samples as a model takes them: documents that share a row, kept apart where that is wanted.

Rows of tokens come from `loader`; positions, masks and labels go to the trainer. The rules are
those of Megatron's get_ltor_masks_and_position_ids: a document begins behind the end of another.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokamake.data.samples.loader import PAD


class PackedSamples(NamedTuple):
    """What a model needs of a batch of B samples of S tokens."""

    loss_mask: npt.NDArray[np.bool_]
    """(B, S) where the loss counts."""
    position_ids: npt.NDArray[np.int64]
    """(B, S) position of each token in its row, or in its document."""
    document_ids: npt.NDArray[np.int32]
    """(B, S) number of the document within the row; a token sees those of its own number alone."""


def packed(
    rows: npt.NDArray[np.int64],
    *,
    eod: int,
    reset_position_ids: bool = False,
    reset_attention_mask: bool = False,
    eod_mask_loss: bool = False,
) -> PackedSamples:
    """Loss mask, positions and document numbers that keep the documents of a row apart.

    Args:
        rows: (B, S + 1) tokens of samples; where the label is `PAD` there is no loss.
        eod: token that ends a document.
        reset_position_ids: count positions anew in each document.
        reset_attention_mask: let no token see those of another document.
        eod_mask_loss: leave out the loss where the input is the end of a document, whose successor
            cannot be known.
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
    missing = rows == PAD
    if missing.any():
        loss_mask = loss_mask & ~missing[:, 1:]
    return PackedSamples(loss_mask, position_ids, document_ids)


def attention_mask(document_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    """(B, S, S), whether token i of a row sees token j: one before it, in the same document."""
    length = document_ids.shape[1]
    same = document_ids[:, :, None] == document_ids[:, None, :]
    causal: npt.NDArray[np.bool_] = np.tri(length, dtype=bool)
    return same & causal


def sequence_bounds(document_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """(documents + 1,) where documents begin if all rows stand one after the other.

    As `cu_seqlens` of attention kernels for sequences of varying length; the last is B x S.
    """
    begins = np.ones(document_ids.shape, bool)
    begins[:, 1:] = np.diff(document_ids, axis=1) != 0
    return np.append(begins.ravel().nonzero()[0], document_ids.size).astype(np.int32)
