"""Documents of a planned shard as `tokenize` writes them: good ones that pass the filters."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from tokamake.data.corpus import documents
from tokamake.data.corpus.documents import Fields
from tokamake.data.corpus.plan_file import PlannedShard
from tokamake.data.readers import Input, RecordBlock, open_unchanged, parse_range, select_texts

if TYPE_CHECKING:
    from tokamake.data.filters._run import FilterRun


class FilteredBlock(NamedTuple):
    """A block of a raw file, and the documents that are left of it."""

    file: int
    """Index of the raw file in the shard."""
    block: RecordBlock
    columns: tuple[Sequence[str], ...]
    """Texts of the documents that are left, for each text key."""
    kept: npt.NDArray[np.int64]
    """(documents,) index in the block of each document that is left, ascending."""


class DocumentSource(NamedTuple):
    """How documents are read and filtered."""

    fields: Fields
    filters: "FilterRun"
    format: str
    on_bad_document: Literal["stop", "quarantine"]
    """Whether to stop at a bad document and at one on which a filter fails, or to leave it out."""

    def blocks(
        self, shard: PlannedShard, left_out: npt.NDArray[np.int64]
    ) -> Iterator[FilteredBlock]:
        """Yield the blocks of a shard in order, also those without a document that is left.

        Args:
            left_out: ordinals of documents of the shard that no filter should see, ascending.
        """
        paths = [Path(path) for path in shard.files]
        byte_range = parse_range(shard.byte_range, paths)
        inputs = open_unchanged(paths, shard.stamps, byte_range=byte_range, format=self.format)
        num_read = 0
        for file, source in enumerate(inputs):
            for block in source.blocks(self.fields.read_keys, self.filters.metadata_keys):
                columns, kept, bad = documents.texts(block, self.fields)
                set_aside = partial(self._set_aside, source, block)
                for index, reason in bad:
                    set_aside(index, reason)
                if len(left_out):
                    is_new = ~np.isin(kept + num_read, left_out, assume_unique=True)
                    indices = np.flatnonzero(is_new).tolist()
                    columns = tuple(select_texts(column, indices) for column in columns)
                    kept = kept[is_new]
                columns, kept = self.filters.apply(
                    columns, block, source=source, indices=kept, on_failure=set_aside
                )
                num_read += len(block.records)
                yield FilteredBlock(file, block, columns, kept)

    def _set_aside(self, source: Input, block: RecordBlock, index: int, reason: str) -> None:
        if self.on_bad_document == "stop":
            raise documents.bad_document(documents.place(source, block, index), reason)
