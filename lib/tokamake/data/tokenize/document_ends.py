"""Tokens at the ends of each document: beginning of sequence (bos), end of document (eod)."""

import numpy as np
import numpy.typing as npt

from tokamake._csrc import pack
from tokamake.data.tokenize.shard_reader import EncodedBatch


def framed(
    encoded: EncodedBatch, dtype: type[np.integer], *, bos: int | None, eod: int | None
) -> tuple[npt.NDArray[np.integer], npt.NDArray[np.int64]]:
    """Return tokens with bos and eod in the dataset's dtype, and the lengths of sequences."""
    counts = encoded.counts[encoded.counts > 0]
    ends = counts.cumsum()
    lengths = encoded.lengths.copy()
    # bos and eod frame documents, not sequences: `pack` needs the tokens of each document.
    document_lengths = np.add.reduceat(lengths, ends - counts) if len(counts) else lengths
    lengths[ends - 1] += eod is not None
    lengths[ends - counts] += bos is not None
    first, last = (-1 if token is None else token for token in (bos, eod))
    tokens = pack(encoded.ids, document_lengths, bos=first, eod=last, dtype=dtype)
    return tokens, lengths
