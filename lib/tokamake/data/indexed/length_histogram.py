"""Histogram of document lengths over powers of two, in constant memory."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypedDict

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from tokamake.data.indexed.index_reader import IndexLayout

_CHUNK = 1 << 16
_NUM_BINS = 65


class Bin(TypedDict):
    """Documents of similar length."""

    shortest: int
    """Lowest length in tokens: 0, 1, 2, 4, 8, and so on."""
    longest: int
    """Highest length in tokens: 0, 1, 3, 7, 15, and so on."""
    documents: int
    tokens: int
    """Number of tokens in these documents."""


def document_lengths(layout: "IndexLayout", chunk: int = _CHUNK) -> Iterator[npt.NDArray[np.int64]]:
    """Yield the lengths of documents in tokens, for `chunk` documents at a time.

    The length of a document is the sum over its sequences.
    """
    for first in range(0, layout.bounds.length - 1, chunk):
        bounds = layout.bounds.read(first, chunk + 1)
        lengths = layout.lengths.read(int(bounds[0]), int(bounds[-1] - bounds[0]))
        ends = np.concatenate([np.zeros(1, np.int64), lengths.cumsum()])
        yield np.diff(ends[bounds - bounds[0]])


def histogram(lengths: Iterable[npt.NDArray[np.int64]]) -> list[Bin]:
    """Count documents by tokens: a bin for each power of two, from the first used to the last."""
    documents, tokens = np.zeros(_NUM_BINS, np.int64), np.zeros(_NUM_BINS, np.int64)
    for chunk in lengths:
        # The exponent of a float is exact: 0 for 0, 1 for 1, 2 for 2 and 3, 3 for 4 to 7.
        exponents = np.frexp(chunk)[1]
        documents += np.bincount(exponents, minlength=_NUM_BINS)
        # bincount sums in float64, which is exact below 2^53.
        tokens += np.bincount(exponents, chunk, _NUM_BINS).astype(np.int64)
    return _bins(documents.tolist(), tokens.tolist())


def add(histograms: Iterable[Sequence[Bin]]) -> list[Bin]:
    """Return the sum of histograms, without gaps."""
    documents, tokens = [0] * _NUM_BINS, [0] * _NUM_BINS
    for bins in histograms:
        for bin in bins:
            documents[bin["longest"].bit_length()] += bin["documents"]
            tokens[bin["longest"].bit_length()] += bin["tokens"]
    return _bins(documents, tokens)


def _bins(documents: list[int], tokens: list[int]) -> list[Bin]:
    """Bins from the first to the last one that has a document, by the exponent of the length."""
    used = [exponent for exponent, count in enumerate(documents) if count]
    return [
        Bin(
            shortest=2 ** (exponent - 1) if exponent else 0,
            longest=2**exponent - 1,
            documents=documents[exponent],
            tokens=tokens[exponent],
        )
        for exponent in (range(used[0], used[-1] + 1) if used else ())
    ]


def median_bin(bins: Sequence[Bin]) -> Bin | None:
    """Return the bin of the median document, or None if there is no document."""
    half = sum(bin["documents"] for bin in bins) / 2
    counted = 0
    for bin in bins:
        counted += bin["documents"]
        if bin["documents"] and counted >= half:
            return bin
    return None
