"""How long documents are: a histogram over powers of two, with memory that does not grow.

Lengths come from the index of a pair; histograms go to `describe`'s metadata and to the report.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypedDict

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from tokamake.data.indexed.index_formats import IndexLayout

_CHUNK = 1 << 16
_BINS = 65


class Bin(TypedDict):
    """Documents of about the same length."""

    shortest: int
    """Least length in tokens: 0, 1, 2, 4, 8, and so on."""
    longest: int
    """Greatest length in tokens: 0, 1, 3, 7, 15, and so on."""
    documents: int
    """How many there are."""
    tokens: int
    """Their tokens."""


def document_lengths(layout: "IndexLayout", chunk: int = _CHUNK) -> Iterator[npt.NDArray[np.int64]]:
    """Yield the documents' lengths in tokens, the sum over their sequences, `chunk` at a time."""
    for first in range(0, layout.bounds.length - 1, chunk):
        bounds = layout.bounds.read(first, chunk + 1)
        lengths = layout.lengths.read(int(bounds[0]), int(bounds[-1] - bounds[0]))
        ends = np.concatenate([np.zeros(1, np.int64), lengths.cumsum()])
        yield np.diff(ends[bounds - bounds[0]])


def histogram(lengths: Iterable[npt.NDArray[np.int64]]) -> list[Bin]:
    """Count documents by length: a bin for each power of two, from the first to the last one used.

    Args:
        lengths: arrays (n,) of document lengths in tokens.
    """
    documents, tokens = np.zeros(_BINS, np.int64), np.zeros(_BINS, np.int64)
    for part in lengths:
        # The exponent of a float is exact: 0 for 0, 1 for 1, 2 for 2 and 3, 3 for 4 to 7.
        places = np.frexp(part)[1]
        documents += np.bincount(places, minlength=_BINS)
        tokens += np.bincount(places, part, _BINS).astype(np.int64)  # exact below 2^53
    used = np.flatnonzero(documents)
    if not len(used):
        return []
    return [
        _bin(place, int(documents[place]), int(tokens[place]))
        for place in range(used[0], used[-1] + 1)
    ]


def _bin(place: int, documents: int, tokens: int) -> Bin:
    return Bin(
        shortest=2 ** (place - 1) if place else 0,
        longest=2**place - 1,
        documents=documents,
        tokens=tokens,
    )


def add(histograms: Iterable[Sequence[Bin]]) -> list[Bin]:
    """Sum of histograms, again without a gap."""
    documents, tokens = [0] * _BINS, [0] * _BINS
    for bins in histograms:
        for one in bins:
            documents[one["longest"].bit_length()] += one["documents"]
            tokens[one["longest"].bit_length()] += one["tokens"]
    used = [place for place in range(_BINS) if documents[place]]
    places = range(used[0], used[-1] + 1) if used else range(0)
    return [_bin(place, documents[place], tokens[place]) for place in places]


def median_bin(bins: Sequence[Bin]) -> Bin | None:
    """The bin that the median document lies in; None where there is no document."""
    half = sum(one["documents"] for one in bins) / 2
    counted = 0
    for one in bins:
        counted += one["documents"]
        if one["documents"] and counted >= half:
            return one
    return None
