"""Documents of a job batch as `tokenize` writes them: good ones that pass the filters."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from tokamake.data.corpus import documents
from tokamake.data.corpus.document_rows import checksum, read_duplicates, read_table
from tokamake.data.corpus.documents import Fields
from tokamake.data.corpus.plan_file import PlannedShard, batch_shards
from tokamake.data.readers import Input, RecordBlock, open_unchanged, parse_range, select_texts
from tokamake.runtime.console import progress

if TYPE_CHECKING:
    from tokamake.data.filters._run_and_count import FilterRun


class FilteredBlock(NamedTuple):
    """A block of a raw file, and the documents that are left of it."""

    file: int
    """Index of the raw file in the shard."""
    block: RecordBlock
    columns: tuple[Sequence[str], ...]
    """Texts of the documents that are left, for each text key."""
    kept: npt.NDArray[np.int64]
    """(documents,) index in the block of each document that is left, ascending."""
    unit: str
    """Unit of the numbers of the block's documents, such as line or page."""


class DocumentSource(NamedTuple):
    """How documents are read and filtered: options of the stages that read a job batch."""

    fields: Fields
    format: str = ""
    filters: str = ""
    filter_seconds: float = 60
    on_bad_document: Literal["stop", "quarantine"] = "quarantine"
    """Whether to stop at a bad document and at one on which a filter fails, or to leave it out."""
    duplicates: tuple[Path, ...] = ()
    """Files of documents to leave out, before the filters."""

    def made_from(self) -> dict[str, Any]:
        """Values, as JSON, that decide which documents are left, beside the raw files."""
        options = (self.fields, self.format, self.filters, self.filter_seconds)
        made_from = {
            "options": [*options, self.on_bad_document],
            "duplicates": [checksum(path) for path in self.duplicates],
        }
        if not self.filters:
            return made_from
        from tokamake.config.filters import parse_filters, source_digest

        entries = (each for entry in parse_filters(self.filters) for each in entry.items())
        return {**made_from, "sources": [source_digest(*entry) for entry in entries]}

    def shards(
        self, plan: Path, batch: str
    ) -> Iterator[tuple[PlannedShard, Iterator[FilteredBlock]]]:
        """Yield each shard with its blocks, also blocks without a document that is left."""
        run = None
        if self.filters:
            # These modules import pydantic: 0.25 s.
            from tokamake.config.filters import parse_filters
            from tokamake.data.filters._run_and_count import FilterRun, load_filters, set_up

            set_up(loaded := load_filters(parse_filters(self.filters)))
            run = FilterRun(loaded, seconds=self.filter_seconds, num_samples=0)
        for path in self.duplicates:
            read_table(path, verify=True)
        for shard in batch_shards(plan, batch):
            blocks = progress(
                self._blocks(shard, run),
                label=f"read {shard.name}",
                unit="documents",
                size=lambda filtered: len(filtered.block.records),
            )
            yield shard, blocks

    def _blocks(self, shard: PlannedShard, run: "FilterRun | None") -> Iterator[FilteredBlock]:
        paths = [Path(path) for path in shard.files]
        byte_range = parse_range(shard.byte_range, paths)
        inputs = open_unchanged(paths, shard.stamps, byte_range=byte_range, format=self.format)
        left_out = read_duplicates(self.duplicates, shard.name)
        metadata_keys = run.metadata_keys if run else ()
        num_read = 0
        for file, source in enumerate(inputs):
            for block in source.blocks(self.fields.read_keys, metadata_keys):
                columns, kept, bad = documents.texts(block, self.fields)
                set_aside = partial(self._set_aside, source, block)
                for index, reason in bad:
                    set_aside(index, reason)
                if len(left_out):
                    is_new = ~np.isin(kept + num_read, left_out, assume_unique=True)
                    indices = np.flatnonzero(is_new).tolist()
                    columns = tuple(select_texts(column, indices) for column in columns)
                    kept = kept[is_new]
                if run:
                    columns, kept = run.apply(
                        columns, block, source=source, indices=kept, on_failure=set_aside
                    )
                num_read += len(block.records)
                yield FilteredBlock(file, block, columns, kept, source.unit)

    def _set_aside(self, source: Input, block: RecordBlock, index: int, reason: str) -> None:
        if self.on_bad_document == "stop":
            raise documents.bad_document(documents.place(source, block, index), reason)
