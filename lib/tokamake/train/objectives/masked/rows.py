"""Samples of masked tokens as the trainer takes them: inputs and labels of an encoder.

`data.samples` makes such samples as records of numpy arrays; `masked_rows` reads their fields.
Shape suffixes: B samples of a micro batch, L tokens.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokamake.train.objectives._encoder_rows import EncoderInputs, encoder_arrays, one_per_row, pack

Integers = npt.NDArray[np.int64]


class MaskedRows(NamedTuple):
    """A micro batch of masked samples.

    The loss of a global batch is the mean cross entropy of its masked tokens, plus the mean cross
    entropy of the order of its samples if the model has a head for it. A global batch without a
    masked token has no loss of tokens.
    """

    tokens: Integers
    """(B, L) tokens of the inputs: some are masked, padding comes last."""
    types: Integers
    """(B, L) type of each token: 0 in the first part of a sample, 1 in the second one."""
    labels: Integers
    """(B, L) tokens before masking, -100 (`NO_LABEL`) where there is no loss."""
    padding_mask: npt.NDArray[np.bool_]
    """(B, L) True for tokens, False for padding. A token that equals the padding token can be a
    token, because masking draws random ones."""
    is_random: Integers
    """(B,) 1 if the two parts of a sample are swapped, else 0. Megatron calls it so."""

    def inputs(self) -> EncoderInputs:
        """Inputs of the model; each row is a sample."""
        arrays = encoder_arrays(self.types, self.padding_mask)
        return EncoderInputs(self.tokens, arrays, one_per_row(*self.tokens.shape))

    def packed_inputs(self) -> EncoderInputs:
        """Inputs of the model; samples share rows."""
        lengths = self.padding_mask.sum(1)
        (packing,) = pack([lengths], [self.tokens.shape[1]])
        arrays = {
            "token_types": packing.rows(self.types, padding=0),
            "document_ids": packing.sample_ids,
            "sample_places": packing.places,
        }
        return EncoderInputs(packing.rows(self.tokens, padding=0), arrays, packing)


def masked_rows(records: npt.NDArray[Any]) -> MaskedRows:
    """Fields of (B,) records: int64 tokens, types, labels (L,), num_tokens, is_swapped."""
    tokens = records["tokens"]
    padding_mask = np.arange(tokens.shape[-1]) < records["num_tokens"][..., None]
    return MaskedRows(
        tokens, records["types"], records["labels"], padding_mask, records["is_swapped"]
    )
