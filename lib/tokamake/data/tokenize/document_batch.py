"""Batches of documents between the reader, the encoder threads and the writer of a shard."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokamake.data.readers import Utf8
from tokamake.data.tokenize.encoder import text_size

# Small enough that the same pages of memory serve one batch after the other.
_BATCH_CHARACTERS = 2 << 20
# Overhead of a document in characters: it bounds the number of empty documents in a batch.
_DOCUMENT_CHARACTERS = 64


class DocumentBatch(NamedTuple):
    """Documents for the encoder, and their places in the raw files."""

    columns: tuple[Sequence[str], ...]
    """Texts of the documents, one sequence per text key."""
    inputs: npt.NDArray[np.int64]
    """(documents,) index of the raw file."""
    numbers: npt.NDArray[np.int64]
    """(documents,) line or row."""
    offsets: npt.NDArray[np.int64]
    """(documents,) first byte of the line, or -1."""


class EncodedBatch(NamedTuple):
    """Token ids of a document batch for one text key."""

    ids: npt.NDArray[np.uint32]
    """(tokens,) token ids of all sequences, concatenated."""
    lengths: npt.NDArray[np.int64]
    """(sequences,) tokens of each sequence, at least one."""
    counts: npt.NDArray[np.int64]
    """(documents,) sequences of each document, 0 for an empty one."""
    text_bytes: int


def merge_small_batches(batches: Iterable[DocumentBatch]) -> Iterator[DocumentBatch]:
    """Concatenate batches up to a size, so that many small files cost no more than a large one."""
    pending: list[DocumentBatch] = []
    size = 0
    for batch in batches:
        pending.append(batch)
        size += sum(map(text_size, batch.columns)) + _DOCUMENT_CHARACTERS * len(batch.inputs)
        if size >= _BATCH_CHARACTERS:
            yield _concatenate(pending)
            pending, size = [], 0
    if pending:
        yield _concatenate(pending)


def _concatenate(batches: list[DocumentBatch]) -> DocumentBatch:
    if len(batches) == 1:
        return batches[0]
    columns = zip(*(batch.columns for batch in batches), strict=True)
    return DocumentBatch(
        tuple(map(_concatenate_texts, columns)),
        *(np.concatenate([batch[field] for batch in batches]) for field in (1, 2, 3)),
    )


def _concatenate_texts(columns: tuple[Sequence[str], ...]) -> Sequence[str]:
    utf8 = [column for column in columns if isinstance(column, Utf8)]
    if len(utf8) == len(columns):
        return Utf8.joined(utf8)
    return [text for column in columns for text in column]


def utf8_bytes(texts: Sequence[str]) -> int:
    if isinstance(texts, Utf8):
        return texts.data.size
    return sum(len(text) if text.isascii() else len(text.encode()) for text in texts)
