"""Stage `find_duplicates`: find exact duplicates in corpora by the hashes of their documents."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tokamake.data.corpus.document_rows import HASH, ORDINAL, RowsWriter, read_rows, read_table
from tokamake.errors import UserError
from tokamake.files import atomic

_PART_ROWS = 1 << 24  # hashes compared at once; sorting them takes about 1 GB of memory
_CHUNK_ROWS = 1 << 22  # hashes read at once


def find_duplicates(files: list[Path], /, *, output: Path) -> None:
    """Find documents with the text of an earlier document.

    The first document of each text is kept. The stage compares one part of the range of hashes at
    a time. Therefore memory does not grow with the number of documents, except by 8 bytes per
    duplicate.

    Args:
        files: files of hashes from `hash-documents`, in the order of the corpora.
        output: file of duplicates to write; an input of `tokenize`.
    """
    if not files:
        raise UserError("find-duplicates: no file given; name at least one")
    tables = [entry for path in files for entry in read_table(path, verify=True)]
    total = sum(rows for _, rows in tables)
    num_parts = max(1, -(-total // _PART_ROWS))
    duplicates = np.sort(
        np.concatenate([_repeated_rows(*part) for part in _hash_parts(files, num_parts)])
    )
    with atomic(output) as (temporary,), RowsWriter(temporary) as writer:
        first = 0
        for shard, rows in tables:
            start, end = np.searchsorted(duplicates, [first, first + rows])
            writer.add(shard, (duplicates[start:end] - first).astype(ORDINAL))
            first += rows
    share = len(duplicates) / total if total else 0.0
    print(f"{output}: {len(duplicates):,} of {total:,} documents are duplicates ({share:.2%})")


def _hash_parts(
    files: list[Path], num_parts: int
) -> Iterator[tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]]:
    """Yield the hashes (rows, 2) of each part of their range, and their row numbers (rows,)."""
    for part in range(num_parts):
        hashes, numbers, first = [np.zeros((0, 2), HASH)], [np.zeros(0, np.int64)], 0
        for path in files:
            rows = read_rows(path, HASH, width=2)
            for start in range(0, len(rows), _CHUNK_ROWS):
                chunk = rows[start : start + _CHUNK_ROWS]
                # The top 32 bits as a fraction of 1, times num_parts: equal hashes share a part.
                indices = np.flatnonzero((chunk[:, 0] >> np.uint64(32)) * num_parts >> 32 == part)
                hashes.append(chunk[indices])
                numbers.append(indices + (first + start))
            first += len(rows)
        yield np.concatenate(hashes), np.concatenate(numbers)


def _repeated_rows(
    hashes: npt.NDArray[np.uint64], numbers: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Return the row numbers whose hash is also in an earlier row; `numbers` must ascend."""
    order = np.lexsort((hashes[:, 1], hashes[:, 0]))  # stable: equal hashes keep their order
    ordered = hashes[order]
    is_repeated = (ordered[1:] == ordered[:-1]).all(axis=1)
    return numbers[order[1:][is_repeated]]
