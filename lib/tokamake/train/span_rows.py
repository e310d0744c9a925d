"""Samples of span corruption as the trainer takes them: what an encoder reads, a decoder predicts.

`data.samples` makes such samples as records of numpy arrays; `span_rows` reads their fields.
Shape suffixes: B samples of a micro batch, L tokens of the encoder, M tokens of the decoder.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokamake.parallel.loss import NO_LABEL

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

    def inputs(self, multiple: int) -> dict[str, npt.NDArray[Any]]:
        """Further inputs of the model.

        Args:
            multiple: number of ranks that divide the decoder's tokens.
        """
        arrays: dict[str, npt.NDArray[Any]] = {
            "decoder_tokens": _filled(self.decoder_tokens, multiple, value=0)
        }
        if not self.padding_mask.all():
            # Padding is a document of its own. Without any, kernels need no mask.
            arrays["document_ids"] = (~self.padding_mask).astype(np.int64)
        return arrays

    def padded_labels(self, multiple: int) -> Integers:
        """Labels, as many as decoder tokens in `inputs`."""
        return _filled(self.labels, multiple, value=NO_LABEL)


def _filled(rows: Integers, multiple: int, *, value: int) -> Integers:
    return np.pad(rows, ((0, 0), (0, -rows.shape[1] % multiple)), constant_values=value)


def span_rows(records: npt.NDArray[Any]) -> SpanRows:
    """Return the fields of records.

    Args:
        records: (B,) with int64 fields tokens (L,), decoder_tokens and labels (M,), and num_tokens.
    """
    tokens = records["tokens"]
    padding_mask = np.arange(tokens.shape[-1]) < records["num_tokens"][..., None]
    return SpanRows(tokens, records["decoder_tokens"], records["labels"], padding_mask)
