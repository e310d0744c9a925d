"""Files of sorted band keys: later documents are compared with them, without the earlier texts.

The format is the one of `document_rows`, with sections in place of shards: `keys <band>` has the
keys of a band, ascending, and `kept <band>` the document that is kept of each; `places` has the
place of each document; `shard <JSON>` is empty and names a shard, its number of documents and its
raw files. Documents are numbered over all shards.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokamake.data.corpus.document_rows import HASH, RowsWriter, read_rows, read_table
from tokamake.errors import UserError

Keys = npt.NDArray[np.uint64]
Shard = tuple[str, int, Sequence[str]]
"""Name of a shard, its number of documents, and its raw files."""


class KeyFile(NamedTuple):
    """Sorted keys of earlier data, mapped into memory."""

    path: Path
    keys: list[Keys]
    """Keys of each band, ascending."""
    kept: list[Keys]
    """Document that is kept, for each key of each band."""
    places: Keys
    """(documents,) place of each document in its shard."""
    shards: list[Shard]

    @classmethod
    def open(cls, path: Path, *, num_bands: int) -> "KeyFile":
        """Map a file, after all its bytes are compared with their CRC-32.

        Raises:
            UserError: the file is damaged, or has keys of other settings; 0 bands fit any file.
        """
        sections, shards, first = dict[str, Keys](), list[Shard](), 0
        table = read_table(path, verify=True)
        values = read_rows(path, HASH)[:, 0]
        for name, size in table:
            if name.startswith("shard "):
                shard, documents, files = json.loads(name.removeprefix("shard "))
                shards.append((shard, documents, files))
            sections[name] = values[first : first + size]
            first += size
        bands = sum(name.startswith("keys ") for name in sections)
        if not bands or (num_bands and bands != num_bands):
            raise UserError(
                f"{path}: has keys of {bands} bands, not {num_bands}; use the same settings of "
                "near_duplicates, or leave it out of against"
            )
        keys, kept = ([sections[f"{kind} {n}"] for n in range(bands)] for kind in ("keys", "kept"))
        return cls(path, keys, kept, sections["places"], shards)


def write_key_file(
    path: Path, bands: Iterable[tuple[Keys, Keys]], *, places: Keys, shards: Iterable[Shard]
) -> None:
    """Write the keys of each band, with the kept document of each; see `KeyFile`."""
    with RowsWriter(path) as writer:
        for band, (keys, kept) in enumerate(bands):
            writer.add(f"keys {band}", keys)
            writer.add(f"kept {band}", kept)
        writer.add("places", places)
        for shard in shards:
            writer.add(f"shard {json.dumps(shard)}", places[:0])
