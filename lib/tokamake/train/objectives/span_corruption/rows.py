"""Samples of span corruption as the trainer takes them: inputs of an encoder, labels of a decoder.

`data.samples` makes such samples as records of numpy arrays; `span_rows` reads their fields.
Shape suffixes: B samples of a micro batch, L tokens of the encoder, M tokens of the decoder.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokamake.parallel.loss import NO_LABEL
from tokamake.train.objectives._encoder_rows import EncoderInputs, one_per_row, pack

Integers = npt.NDArray[np.int64]


class SpanRows(NamedTuple):
    """A micro batch of samples whose spans the decoder restores.

    The loss of a global batch is the mean cross entropy of the decoder's tokens.
    """

    tokens: Integers
    """(B, L) tokens of the encoder: sentinels replace spans, padding comes last."""
    decoder_tokens: Integers
    """(B, M) tokens of the decoder: sentinels and spans, padding comes last."""
    labels: Integers
    """(B, M) successors of the decoder's tokens, -100 (`NO_LABEL`) where there is no loss."""
    padding_mask: npt.NDArray[np.bool_]
    """(B, L) True for tokens of the encoder, False for padding."""

    def inputs(self, multiple: int) -> EncoderInputs:
        """Inputs of the model, a row per sample; decoder tokens are padded to the `multiple`."""
        of_decoder = one_per_row(*self.labels.shape, row_length=self._row_length(multiple))
        arrays = {"decoder_tokens": of_decoder.rows(self.decoder_tokens, padding=0)}
        if not self.padding_mask.all():
            # Padding is a document of its own. Without any, kernels need no mask.
            arrays["document_ids"] = (~self.padding_mask).astype(np.int64)
        return EncoderInputs(self.tokens, arrays, of_decoder)

    def packed_inputs(self, multiple: int) -> EncoderInputs:
        """Inputs of the model; samples share rows. For the argument see `inputs`."""
        num_labels = self.labels.shape[1]
        # No loss depends on tokens of the decoder after the last label.
        has_label = self.labels != NO_LABEL
        decoder_lengths = num_labels - has_label[:, ::-1].argmax(1)
        decoder_lengths[~has_label.any(1)] = 1
        lengths = [self.padding_mask.sum(1), decoder_lengths]
        packing, of_decoder = pack(lengths, [self.tokens.shape[1], self._row_length(multiple)])
        sample_ids = of_decoder.sample_ids
        # Padding comes after the last sample, and belongs to it: each token sees at least itself.
        sample_ids[sample_ids == len(self.tokens)] = -1
        arrays = {
            "document_ids": packing.sample_ids,
            "decoder_tokens": of_decoder.rows(self.decoder_tokens, padding=0),
            "decoder_document_ids": np.maximum.accumulate(sample_ids, axis=1),
        }
        return EncoderInputs(packing.rows(self.tokens, padding=0), arrays, of_decoder)

    def _row_length(self, multiple: int) -> int:
        length = self.labels.shape[1]
        return length + -length % multiple


def span_rows(records: npt.NDArray[Any]) -> SpanRows:
    """Fields of (B,) records: int64 tokens (L,), decoder_tokens, labels (M,), num_tokens."""
    tokens = records["tokens"]
    padding_mask = np.arange(tokens.shape[-1]) < records["num_tokens"][..., None]
    return SpanRows(tokens, records["decoder_tokens"], records["labels"], padding_mask)
