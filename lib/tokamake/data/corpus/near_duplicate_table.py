"""The table of near-duplicates: places of the documents that are dropped and kept."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from tokamake.data.corpus.document_rows import HASH
from tokamake.data.corpus.near_duplicate_keys import KeyFile, Keys, Shard
from tokamake.data.corpus.sign_documents import unpack_places


class Twins(NamedTuple):
    """Documents that are dropped, and the documents that are kept in their place."""

    dropped: npt.NDArray[np.int64]
    """(duplicates,) documents that are dropped, ascending."""
    roots: npt.NDArray[np.uint32]
    """(documents,) first document of the cluster of each document."""
    matches: npt.NDArray[np.int64]
    """(documents,) document of earlier data that is kept in place of each document, or -1."""


class PlacedDocuments(NamedTuple):
    """Documents with their shards, numbered over all of them."""

    shards: Sequence[Shard]
    """Names of shards, their numbers of documents, and their raw files."""
    places: Keys
    """(documents,) place of each document in its shard."""

    @classmethod
    def of_files(cls, files: Sequence[KeyFile]) -> "PlacedDocuments":
        """Documents of all files, one file after the other."""
        places = np.concatenate([np.zeros(0, HASH), *(file.places for file in files)])
        return cls([shard for file in files for shard in file.shards], places)

    def columns(self, rows: npt.NDArray[Any]) -> dict[str, pa.Array]:
        """Shard, ordinal, raw file, and byte or line (or row) of documents."""
        ends = np.cumsum([0, *(count for _, count, _ in self.shards)])
        numbers = np.searchsorted(ends, rows, side="right") - 1
        firsts = np.cumsum([0, *(len(files) for _, _, files in self.shards)])
        place = unpack_places(self.places[rows])
        names = [name for name, _, _ in self.shards]
        files = [file for _, _, files in self.shards for file in files]
        return {
            "shard": _texts(numbers, names),
            "document": pa.array(rows.astype(np.int64) - ends[numbers]),
            "file": _texts(firsts[numbers] + place.file, files),
            "byte": pa.array(place.number, mask=~place.is_byte),
            "line": pa.array(place.number, mask=place.is_byte),
        }


def _texts(numbers: npt.NDArray[np.int64], texts: Sequence[str]) -> pa.Array:
    values = pa.array(list(texts), pa.string())
    return pa.DictionaryArray.from_arrays(pa.array(numbers), values).cast(pa.string())


def write_table(
    path: Path, twins: Twins, *, own: PlacedDocuments, earlier: PlacedDocuments
) -> None:
    """Write a parquet file with a row for each duplicate.

    It has the columns of `PlacedDocuments.columns`, and again with the prefix kept_ for the
    document that is kept.
    """
    dropped, roots, matches = twins
    is_earlier = matches[dropped] >= 0
    order = np.argsort(np.concatenate((np.flatnonzero(~is_earlier), np.flatnonzero(is_earlier))))
    kept = own.columns(roots[dropped[~is_earlier]])
    kept_earlier = earlier.columns(matches[dropped[is_earlier]])
    both = {
        f"kept_{name}": pa.concat_arrays([kept[name], kept_earlier[name]]).take(pa.array(order))
        for name in kept
    }
    pq.write_table(pa.table({**own.columns(dropped), **both}), path)
