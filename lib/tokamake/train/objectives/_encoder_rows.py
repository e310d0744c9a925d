"""Inputs of encoders; packing: samples of a micro batch share rows, to reduce padding.

Attention keeps samples apart, and positions begin in each, so losses and gradients stay the same.
Shape suffixes: B samples of a micro batch, W most tokens of a sample, R rows, L tokens of a row.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokamake.parallel.loss import NO_LABEL
from tokamake.train.batch import HostBatch

Integers = npt.NDArray[np.int64]


class Packing(NamedTuple):
    """Places of the samples of a micro batch in rows that they share."""

    lengths: Integers
    """(B,) tokens of each sample."""
    places: Integers
    """(B,) flat index of each sample's first token in the (R, L) grid."""
    shape: tuple[int, int]
    """R and L."""

    def rows(self, values: npt.NDArray[Any], *, padding: int) -> npt.NDArray[Any]:
        """Rows (R, L) of the values of each token of the samples, (B, W) or of a shape that
        broadcasts to it; `padding` where a row has no token."""
        width = int(self.lengths.max())
        offsets = np.arange(width)
        is_token = offsets < self.lengths[:, None]
        packed = np.full(self.shape, padding, values.dtype)
        by_token = values[:, :width] if values.shape[1] > 1 else values
        values_BW = np.broadcast_to(by_token, is_token.shape)
        packed.reshape(-1)[(self.places[:, None] + offsets)[is_token]] = values_BW[is_token]
        return packed

    @property
    def sample_ids(self) -> Integers:
        """(R, L) number in the micro batch of each token's sample; B where a row has no token."""
        numbers = np.arange(len(self.lengths))
        return self.rows(numbers[:, None], padding=len(numbers))

    def places_of(self, tokens: Integers, width: int) -> Integers:
        """Flat indices of tokens in the (R, L) grid, from indices in the (B, W) grid."""
        return self.places[tokens // width] + tokens % width


def one_per_row(num_samples: int, length: int, *, row_length: int | None = None) -> Packing:
    """A row for each sample.

    Args:
        length: tokens of each sample, padding included.
        row_length: L; None: as many.
    """
    row_length = row_length or length
    places = np.arange(num_samples) * row_length
    return Packing(np.full(num_samples, length), places, (num_samples, row_length))


class EncoderInputs(NamedTuple):
    """Inputs of an encoder, or of an encoder-decoder, for a micro batch."""

    tokens: Integers
    """(B, L) tokens of the encoder; (R, L) if samples share rows."""
    further: dict[str, npt.NDArray[Any]]
    """Keyword arguments of `Model.forward`."""
    labeled: Packing
    """Rows of the stack that has the labels: encoder or decoder."""


def encoder_arrays(
    types: Integers, padding_mask: npt.NDArray[np.bool_]
) -> dict[str, npt.NDArray[Any]]:
    """token_types, and document_ids that hide padding (where the (B, L) mask is False)."""
    arrays: dict[str, npt.NDArray[Any]] = {"token_types": types}
    if not padding_mask.all():
        # Padding is a document of its own. Without any, kernels need no mask.
        arrays["document_ids"] = (~padding_mask).astype(np.int64)
    return arrays


def labeled_batch(inputs: EncoderInputs, labels: Integers, *, in_rows: bool) -> HostBatch:
    """Micro batch of an encoder or encoder-decoder.

    Args:
        labels: (B, W) labels of each sample, `NO_LABEL` where there is no loss.
        in_rows: whether its labels are rows; if not, the model computes logits of labels alone.
    """
    packing, arrays = inputs.labeled, inputs.further
    if in_rows:
        return HostBatch(inputs.tokens, packing.rows(labels, padding=NO_LABEL), arrays)
    numbers = np.flatnonzero(labels != NO_LABEL)
    places = packing.places_of(numbers, labels.shape[1])
    return HostBatch(
        inputs.tokens,
        labels.flatten()[numbers],
        {**arrays, "label_places": places},
        label_numbers=numbers,
    )


def pack(lengths: Sequence[Integers], row_lengths: Sequence[int]) -> list[Packing]:
    """Distribute the samples of a micro batch to rows, first fit, long samples first.

    Args:
        lengths: (B,) tokens of each sample, for each stack of the model.
        row_lengths: tokens of a row, for each stack.

    Returns:
        Packing of each stack. Stacks have the same samples in a row, in the order of their numbers.
    """
    sizes = np.stack([*lengths])
    capacity = np.array(row_lengths)
    assert (sizes <= capacity[:, None]).all(), "a sample is longer than a row"
    num_samples = sizes.shape[1]
    remaining = np.repeat(capacity[:, None], num_samples, axis=1)  # in as many rows as may be
    row_of = np.zeros(num_samples, np.int64)
    for sample in np.argsort(-(sizes / capacity[:, None]).max(0), kind="stable"):
        fits = (remaining >= sizes[:, sample, None]).all(0)
        row_of[sample] = row = int(fits.argmax())
        remaining[:, row] -= sizes[:, sample]
    num_rows = int(row_of.max()) + 1
    return [
        Packing(own, _places(own, row_of, row_length=length), (num_rows, length))
        for own, length in zip(sizes, row_lengths, strict=True)
    ]


def _places(lengths: Integers, row_of: Integers, *, row_length: int) -> Integers:
    """(B,) flat index of each sample's first token in the grid of the rows."""
    ends: dict[int, int] = {}
    places = np.empty_like(lengths)
    for sample, (length, row) in enumerate(zip(lengths.tolist(), row_of.tolist(), strict=True)):
        start = ends.get(row, 0)
        places[sample] = row * row_length + start
        ends[row] = start + length
    return places
