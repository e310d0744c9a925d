"""Read the documents of a shard: the good ones that are no duplicates and pass the filters."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tokamake.data.corpus import documents
from tokamake.data.corpus.quarantine import Quarantine
from tokamake.data.readers import Input, select_texts
from tokamake.data.tokenize.document_batch import DocumentBatch
from tokamake.data.tokenize.shard_options import ShardOptions
from tokamake.errors import UserError

if TYPE_CHECKING:
    from tokamake.data.filters._run import FilterRun, LoadedFilter


class ShardReader:
    """Reads the raw files of a shard. Each is opened after the one before it is finished."""

    def __init__(
        self,
        inputs: Iterable[Input],
        options: ShardOptions,
        *,
        duplicates: npt.NDArray[np.int64] | None,
        filters: "Sequence[LoadedFilter]",
        quarantine: Quarantine,
    ) -> None:
        """Prepare to read.

        Args:
            duplicates: ordinals of documents to leave out, ascending, counted over all inputs.
            filters: filters of the documents that are left.
        """
        self._inputs = inputs
        self._options = options
        self._duplicates = np.zeros(0, np.int64) if duplicates is None else duplicates
        self._filters: FilterRun | None = None
        if filters:
            from tokamake.data.filters import _run  # imports pydantic, which takes 0.25 s

            self._filters = _run.FilterRun(filters)
        self._quarantine = quarantine
        self._num_read = self._num_duplicates = 0
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
            for index, reason in texts.bad:
                if self._options.on_bad_document == "stop":
                    place = documents.place(source, block, index)
                    raise UserError(f"{place}: {reason}, or set on_bad_document to quarantine")
                self._quarantine.add(source, block, index, reason)
            self._num_read += len(block.records)
            kept = is_kept.nonzero()[0].tolist()
            columns = tuple(select_texts(column, kept) for column in texts.columns)
            indices = texts.kept[is_kept]
            if self._filters:
                place_of = partial(documents.place, source, block)
                columns, indices = self._filters.apply(
                    columns, block, indices=indices, place=place_of
                )
            yield DocumentBatch(
                columns,
                np.full(len(indices), number, np.int64),
                block.numbers[indices],
                block.offsets[indices],
            )

    def place(self, batch: DocumentBatch, index: int) -> str:
        """Return the place of a document of a batch, for messages."""
        source = self._opened[batch.inputs[index]]
        return source.place(int(batch.numbers[index]), int(batch.offsets[index]))

    def manifest(self) -> dict[str, Any]:
        """Return the counts of the documents that were left out, for the manifest."""
        counts: dict[str, Any] = {
            "documents_in": self._num_read,
            "quarantined_documents": self._quarantine.documents,
            "duplicate_documents": self._num_duplicates,
        }
        if self._filters:  # manifests without filters stay as earlier versions wrote them
            counts |= {"filtered_documents": self._filters.dropped, "filters": self._filters.counts}
        return counts

    @property
    def entries(self) -> list[dict[str, Any]]:
        """Entries of the manifest, one for each raw file."""
        return self._entries

    def _is_not_duplicate(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return a mask of a block's good documents that are not duplicates, and count the rest."""
        if not len(self._duplicates):
            return np.ones(len(indices), bool)
        mask = ~np.isin(indices + self._num_read, self._duplicates, assume_unique=True)
        self._num_duplicates += int(len(indices) - mask.sum())
        return mask

    def _check_file(self, source: Input) -> None:
        """Refuse a file without good documents, or with too many bad ones.

        A text file is one document: the fraction of the shard counts those.
        """
        quarantine = self._quarantine
        if source.format == "text" or not (num_bad := quarantine.documents_of(source)):
            return
        if num_bad == source.documents and not source.start and source.end is None:
            raise UserError(
                f"{quarantine.first}; no document of the file is good: it is damaged, or its "
                "text_key or format is wrong; fetch it again or leave it out"
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
    """Return the manifest's entry of a raw file that was read to its end."""
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
    }
