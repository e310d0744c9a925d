"""Chunks of documents, which are neighbors of the chunks of samples.

A document is cut into chunks of m tokens; the last one may be shorter. Its end-of-document token is
in no chunk. As for the objective causal, each sequence of a dataset counts as a document. Chunks of
a dataset are numbered in order; chunks of several datasets are numbered dataset by dataset.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokamake import files
from tokamake.data.indexed.dataset import IndexedDataset
from tokamake.errors import UserError

Numbers = npt.NDArray[np.int64]

INDEX_NAME = "chunks.json"
"""Manifest of the index of all chunks, in the folder of neighbors."""
REMEDY = "run `tokamake index-chunks` and `tokamake find-neighbors`, or their rules, again"
FIRST_CHUNKS = ".npy"
"""Suffix of the file with the number of the first chunk of each document, then of all chunks."""
_DOCUMENTS = 1 << 20
"""Documents whose lengths are computed at once."""


def text_lengths(dataset: IndexedDataset, documents: Numbers, *, eod: int) -> Numbers:
    """(n,) tokens of documents, without the end-of-document token at their end."""
    lengths: Numbers = dataset.lengths[documents].astype(np.int64)
    filled = lengths > 0
    ends = dataset.pointers[documents[filled]] // dataset.tokens.itemsize + lengths[filled]
    lengths[filled] -= dataset.tokens[ends - 1] == eod
    return lengths


def first_chunks(dataset: IndexedDataset, *, chunk_length: int, eod: int) -> Numbers:
    """(documents + 1,) number of the first chunk of each document, then the number of chunks."""
    counts = [np.zeros(1, np.int64)]
    for start in range(0, len(dataset), _DOCUMENTS):
        documents = np.arange(start, min(start + _DOCUMENTS, len(dataset)))
        counts.append(-(-text_lengths(dataset, documents, eod=eod) // chunk_length))
    return np.cumsum(np.concatenate(counts))


class ChunkedDataset(NamedTuple):
    """A dataset whose chunks are searched, as the manifest of the index has it."""

    prefix: str
    """Dataset, relative to the data root."""
    identity: dict[str, Any]
    """Sizes and hashes, as in index.json."""
    first_document: int
    """Number of its first document among the documents of all datasets."""
    first_chunk: int
    """Number of its first chunk among all chunks."""


class ChunkDatabase:
    """Chunks of all datasets of a training split, by their numbers.

    Attributes:
        request: digest of everything that decides the chunks and their index.
        chunk_length: m.
        datasets: the datasets in order.
        num_documents: documents of all datasets.
    """

    def __init__(self, manifest: Path, *, data_root: Path) -> None:
        facts = files.read_sealed_json(manifest, REMEDY)
        try:
            self.request: str = facts["request"]
            self.chunk_length: int = facts["chunk_length"]
            self.datasets = [ChunkedDataset(**each) for each in facts["datasets"]]
            self._eod: int = facts["eod"]
            self.num_documents: int = facts["num_documents"]
        except (KeyError, TypeError):
            raise UserError(f"{manifest}: not an index of chunks; {REMEDY}") from None
        self._manifest, self._data_root = manifest, data_root
        path = manifest.with_name(manifest.name.removesuffix(".json") + FIRST_CHUNKS)
        self._first_chunks = open_numbers(path, shape=(self.num_documents + 1,), remedy=REMEDY)
        self._first_documents = np.array([each.first_document for each in self.datasets])
        self._opened: dict[int, IndexedDataset] = {}

    def first_document(self, prefix: str) -> int | None:
        """Number of a dataset's first document among all documents; None: it is not searched."""
        found = (each.first_document for each in self.datasets if each.prefix == prefix)
        return next(found, None)

    def documents(self, chunks: Numbers) -> Numbers:
        """Number among all documents of the document of each chunk; -1 for the chunk -1."""
        # Of documents with the same first chunk, all but the last one are empty.
        return np.searchsorted(self._first_chunks, chunks, side="right") - 1

    def read(self, chunks: Numbers, *, width: int) -> tuple[Numbers, Numbers]:
        """Read chunks with what follows them in their documents.

        Args:
            chunks: (n,) numbers; -1: no chunk.
            width: w, most tokens to read.

        Returns:
            (n, w) tokens, 0 after the last one; (n,) number of tokens, 0 for no chunk.
        """
        tokens, counts = np.zeros((len(chunks), width), np.int64), np.zeros(len(chunks), np.int64)
        documents = self.documents(chunks)
        numbers = np.searchsorted(self._first_documents, documents, side="right") - 1
        places = np.arange(width)
        for number in np.unique(numbers[chunks >= 0]).tolist():
            rows = np.flatnonzero(numbers == number)
            dataset = self._dataset(number)
            starts = (chunks[rows] - self._first_chunks[documents[rows]]) * self.chunk_length
            own = documents[rows] - self._first_documents[number]
            left = text_lengths(dataset, own, eod=self._eod) - starts
            if left.min() < 1:
                raise UserError(
                    f"{self._manifest}: chunk {chunks[rows][left.argmin()]} is not in "
                    f"{self.datasets[number].prefix}; {REMEDY}"
                )
            counts[rows] = np.minimum(left, width)
            begins = dataset.pointers[own] // dataset.tokens.itemsize + starts
            read = np.minimum(begins[:, None] + places, len(dataset.tokens) - 1)
            tokens[rows] = np.where(places < counts[rows, None], dataset.tokens[read], 0)
        return tokens, counts

    def _dataset(self, number: int) -> IndexedDataset:
        if number not in self._opened:
            self._opened[number] = IndexedDataset(self._data_root / self.datasets[number].prefix)
        return self._opened[number]


def open_numbers(path: Path, *, shape: tuple[int, ...], remedy: str) -> Numbers:
    """Memory-map a .npy file of int64 of a known shape."""
    try:
        array: Numbers = np.load(path, mmap_mode="r" if 0 not in shape else None)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; {remedy}") from None
    except (ValueError, EOFError) as error:
        raise UserError(f"{path}: damaged ({error}); {remedy}") from None
    if array.dtype != np.int64 or array.shape != shape:
        raise UserError(
            f"{path}: {array.dtype} of shape {array.shape}, its manifest says int64 of {shape}; "
            f"{remedy}"
        )
    return np.asarray(array)
