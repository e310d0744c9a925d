"""Tables of chunks: the number of the first chunk of each document of a dataset.

A table is `NAME.npy`, (documents + 1,) int64, beside the manifest `NAME.json`. The dataset, m and
the end-of-document token alone decide it.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tokamake import files
from tokamake.data.samples.index_folder import identity
from tokamake.errors import UserError
from tokamake.retrieval.products import data_path, is_complete, new_product, read_product
from tokamake.train.objectives.retro.chunks import FIRST_CHUNKS, Numbers, open_numbers

_KIND = "chunks"
_REMEDY = "run `tokamake chunk-documents` again"


class ChunkTable(NamedTuple):
    """Chunks of a dataset."""

    manifest: Path
    facts: dict[str, Any]
    first_chunks: Numbers
    """(documents + 1,) number of the first chunk of each document, then the number of chunks."""

    @property
    def num_chunks(self) -> int:
        return int(self.first_chunks[-1])

    @property
    def request(self) -> str:
        """Digest of everything that decides the chunks."""
        return str(self.facts["request"])

    @property
    def chunk_length(self) -> int:
        return int(self.facts["chunk_length"])

    @property
    def eod(self) -> int:
        """Token at the end of a document that is in no chunk."""
        return int(self.facts["eod"])


def table_facts(prefix: Path, *, chunk_length: int, eod: int) -> dict[str, Any]:
    """Facts that decide the chunks of a dataset, and their digest, `request`."""
    facts = {
        "dataset": identity(prefix.parent, prefix.name, thorough=True),
        "chunk_length": chunk_length,
        "eod": eod,
    }
    return {**facts, "request": files.digest(facts)}


def is_written(manifest: Path, facts: dict[str, Any]) -> bool:
    """Whether a table exists whole, with these facts."""
    return is_complete(manifest, _KIND, request=facts["request"])


def write_table(manifest: Path, first_chunks: Numbers, *, facts: dict[str, Any]) -> None:
    """Write a table; its manifest comes last."""
    facts = {**facts, "num_documents": len(first_chunks) - 1, "num_chunks": int(first_chunks[-1])}
    with (
        new_product(manifest, kind=_KIND, suffixes=(FIRST_CHUNKS,), facts=facts) as product,
        product.paths[FIRST_CHUNKS].open("wb") as file,
    ):
        np.save(file, first_chunks)


def open_table(manifest: Path, *, dataset: dict[str, Any], name: str) -> ChunkTable:
    """Open a table, and check that it is of a dataset.

    Args:
        manifest: of `chunk-documents`.
        dataset: identity of the dataset.
        name: the dataset, for messages.
    """
    facts = read_product(manifest, _KIND, remedy=_REMEDY)
    if facts["dataset"] != dataset:
        raise UserError(f"{manifest}: chunks of another dataset than {name}; {_REMEDY}")
    shape = (facts["num_documents"] + 1,)
    path = data_path(manifest, FIRST_CHUNKS)
    return ChunkTable(manifest, facts, open_numbers(path, shape=shape, remedy=_REMEDY))


def num_chunks_of(manifest: Path) -> int:
    """Chunks of a table, by its manifest alone."""
    return int(read_product(manifest, _KIND, remedy=_REMEDY)["num_chunks"])
