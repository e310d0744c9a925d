"""Read the good documents of a shard that are no duplicates and pass the filters.

Bad documents, and documents on which a filter fails, go to PREFIX.quarantine.jsonl. An entry has
"file", "line", "row", "page" or "record", "byte" (first byte of the line, in uncompressed files;
first byte from which a page can be read), "reason", and "raw" (the original line) or "raw_base64"
if it is not UTF-8. In a byte range that begins far into a file, "line_in_range" replaces "line" and
counts from the start of the range.
"""

import base64
import json
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokamake.data.corpus import documents
from tokamake.data.readers import Input, RecordBlock, Utf8, select_texts
from tokamake.data.tokenize.encoder import text_size
from tokamake.data.tokenize.shard_options import ShardOptions
from tokamake.errors import UserError

if TYPE_CHECKING:
    from tokamake.data.filters._run_and_count import FilterRun, LoadedFilter
    from tokamake.data.tokenize.repeat_cuts import RepeatCuts

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
    num_read: int
    """Documents that were read for it, with duplicates and those that filters dropped."""
    size_read: int
    """`text_size` of these documents."""


class EncodedBatch(NamedTuple):
    """Token ids of a document batch for one text key."""

    ids: npt.NDArray[np.uint32]
    """(tokens,) token ids of all sequences, concatenated."""
    lengths: npt.NDArray[np.int64]
    """(sequences,) tokens of each sequence, at least one."""
    counts: npt.NDArray[np.int64]
    """(documents,) sequences of each document, 0 for an empty one."""
    text_bytes: int


class Quarantine:
    """Writes bad documents to a file; without bad documents there is no file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.documents = 0
        self.first = ""  # place and reason of the first bad document of the last file that has one
        self._source: Input | None = None
        self._in_file = 0
        self._stream: IO[str] | None = None

    def add(self, source: Input, block: RecordBlock, index: int, reason: str) -> None:
        """Write document `index` of a block."""
        if source is not self._source:
            self.first = f"{documents.place(source, block, index)}: {reason}"
            self._source, self._in_file = source, 0
        if self._stream is None:
            # File names need not be UTF-8.
            self._stream = self.path.open("w", encoding="utf-8", errors="surrogateescape")
        # None: the range begins so far into the file that counting its lines would take long.
        lines_before = source.lines_before() if source.unit == "line" else 0
        unit = source.unit if lines_before is not None else "line_in_range"
        entry = {
            "file": str(source.path),
            unit: int(block.numbers[index]) + (lines_before or 0),
            **({"byte": int(block.offsets[index])} if block.offsets[index] >= 0 else {}),
            "reason": reason,
            **_raw(block, index),
        }
        self._stream.write(json.dumps(entry, ensure_ascii=False) + "\n")
        self.documents += 1
        self._in_file += 1

    def documents_of(self, source: Input) -> int:
        return self._in_file if source is self._source else 0

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()


def _raw(block: RecordBlock, index: int) -> dict[str, Any]:
    if block.raw is None:  # a table has records instead of lines
        record = block.records[index]
        if isinstance(record, dict):
            return {"raw": json.dumps(record, default=str)}
        line = record.raw
    else:
        line = block.raw[index]
    try:
        return {"raw": line.decode("utf-8")}
    except UnicodeDecodeError:
        return {"raw_base64": base64.b64encode(line).decode("ascii")}


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
        inputs=np.concatenate([batch.inputs for batch in batches]),
        numbers=np.concatenate([batch.numbers for batch in batches]),
        offsets=np.concatenate([batch.offsets for batch in batches]),
        num_read=sum(batch.num_read for batch in batches),
        size_read=sum(batch.size_read for batch in batches),
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


class ShardReader:
    """Reads the raw files of a shard. Each is opened after the one before it is finished."""

    def __init__(
        self,
        inputs: Iterable[Input],
        options: ShardOptions,
        *,
        duplicates: npt.NDArray[np.int64] | None,
        near_duplicates: npt.NDArray[np.int64] | None,
        repeats: npt.NDArray[Any] | None,
        filters: "Sequence[LoadedFilter]",
        quarantine: Quarantine,
    ) -> None:
        """Prepare to read.

        Args:
            duplicates: ordinals of documents to leave out, ascending, counted over all inputs.
            near_duplicates: ordinals among `duplicates` that are near, not exact, duplicates.
            repeats: rows of `passages.CUT`, spans to cut out of the documents, after the filters.
            filters: filters of the remaining documents.
        """
        self._inputs = inputs
        self._options = options
        self._duplicates = np.zeros(0, np.int64) if duplicates is None else duplicates
        self._near_duplicates = near_duplicates
        self._filters: FilterRun | None = None
        if filters:
            from tokamake.data.filters import _run_and_count  # imports pydantic, which takes 0.25 s

            self._filters = _run_and_count.FilterRun(filters, seconds=options.filter_seconds)
        self._repeats: RepeatCuts | None = None
        if repeats is not None:
            from tokamake.data.tokenize import repeat_cuts  # imports pydantic, too

            self._repeats = repeat_cuts.RepeatCuts(repeats)
        self._quarantine = quarantine
        self._num_read = self._num_duplicates = self._num_near = 0
        self._opened: list[Input] = []
        self._entries: list[dict[str, Any]] = []

    def batches(self) -> Iterator[DocumentBatch]:
        """Yield the documents of all inputs; stop at a bad one or quarantine it."""
        for number, source in enumerate(self._inputs):
            self._opened.append(source)
            yield from self._batches_of(source, number)
            self._check_file(source)
            entry = _input_entry(source) | {"quarantined": self._quarantine.documents_of(source)}
            self._entries.append(entry)
        self._check_bad_fraction(self._quarantine.documents, num_documents=self._num_read)

    def _batches_of(self, source: Input, number: int) -> Iterator[DocumentBatch]:
        fields = self._options.fields
        metadata_keys = self._filters.metadata_keys if self._filters else ()
        for block in source.blocks(fields.read_keys, metadata_keys):
            texts = documents.texts(block, fields)
            is_kept = self._is_not_duplicate(texts.kept)
            set_aside = partial(self._set_aside, source, block)
            for index, reason in texts.bad:
                set_aside(index, reason)
            first = self._num_read
            self._num_read += len(block.records)
            kept = is_kept.nonzero()[0].tolist()
            columns = tuple(select_texts(column, kept) for column in texts.columns)
            indices = texts.kept[is_kept]
            if self._filters:
                columns, indices = self._filters.apply(
                    columns, block, indices=indices, source=source, on_failure=set_aside
                )
            if self._repeats:
                columns, indices = self._repeats.apply(
                    columns, block, indices=indices, first=first, source=source
                )
            yield DocumentBatch(
                columns,
                np.full(len(indices), number, np.int64),
                block.numbers[indices],
                block.offsets[indices],
                num_read=len(block.records),
                size_read=sum(map(text_size, texts.columns)),
            )

    def _set_aside(self, source: Input, block: RecordBlock, index: int, reason: str) -> None:
        """Put document `index` of a block into quarantine, or stop at it."""
        if self._options.on_bad_document == "stop":
            raise documents.bad_document(documents.place(source, block, index), reason)
        self._quarantine.add(source, block, index, reason)

    def place(self, batch: DocumentBatch, index: int) -> str:
        source = self._opened[batch.inputs[index]]
        return source.place(int(batch.numbers[index]), int(batch.offsets[index]))

    def manifest(self) -> dict[str, Any]:
        """Return the counts of the documents that were left out, for the manifest."""
        counts: dict[str, Any] = {
            "documents_in": self._num_read,
            "quarantined_documents": self._quarantine.documents,
            "duplicate_documents": self._num_duplicates,
        }
        if self._near_duplicates is not None:
            counts["near_duplicate_documents"] = self._num_near
        # Manifests without filters and cuts stay as earlier versions wrote them.
        if self._filters or self._repeats:
            filters, repeats = self._filters, self._repeats
            dropped = (filters.dropped if filters else 0) + (repeats.dropped if repeats else 0)
            entries = (filters.counts if filters else []) + ([repeats.counts] if repeats else [])
            counts |= {"filtered_documents": dropped, "filters": entries}
        return counts

    @property
    def entries(self) -> list[dict[str, Any]]:
        return self._entries

    def _is_not_duplicate(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return a mask of a block's good documents that are not duplicates, and count the rest."""
        if not len(self._duplicates):
            return np.ones(len(indices), bool)
        numbers = indices + self._num_read
        mask = ~np.isin(numbers, self._duplicates, assume_unique=True)
        self._num_duplicates += int(len(indices) - mask.sum())
        if self._near_duplicates is not None:
            is_near = np.isin(numbers, self._near_duplicates, assume_unique=True)
            self._num_near += int(is_near.sum())
        return mask

    def _check_file(self, source: Input) -> None:
        """Refuse a file without good documents, or with too many bad ones.

        A text file or a web page is one document: they count in the fraction of the shard.
        """
        quarantine = self._quarantine
        if source.is_one_document or not (num_bad := quarantine.documents_of(source)):
            return
        if num_bad == source.documents and not source.start and source.end is None:
            cause = "it is damaged, or its text_key or format is wrong"
            if self._filters:
                cause = "it is damaged, its text_key or format is wrong, or a filter fails on each"
            raise UserError(
                f"{quarantine.first}; no document of the file is good: {cause}; fetch it again or "
                "leave it out"
            )
        self._check_bad_fraction(num_bad, num_documents=source.documents, where=" of the file")

    def _check_bad_fraction(self, num_bad: int, *, num_documents: int, where: str = "") -> None:
        limit = self._options.max_bad_fraction
        if num_bad > limit * num_documents:
            raise UserError(
                f"{self._quarantine.first}; {num_bad:,} of {num_documents:,} documents{where} are "
                f"bad, more than max_bad_fraction {limit:g}: fix them or raise it"
            )


def _input_entry(source: Input) -> dict[str, Any]:
    is_whole_file = source.start == 0 and source.end is None
    return {
        "path": str(source.path),
        "format": source.format,
        "compression": source.compression,
        "unit": source.unit,
        "byte_range": None if is_whole_file else [source.start, source.end],
        "bytes": source.bytes,
        "sha256": source.sha256,
        "documents": source.documents,
        "blank_lines": source.blank_lines,
        **({"settings": settings} if (settings := source.stated_settings) else {}),
        **({"skipped": source.skipped} if source.skipped else {}),
    }
