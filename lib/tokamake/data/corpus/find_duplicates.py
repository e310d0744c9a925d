"""Stage `find_duplicates`: hashes of a corpus become the ordinals of documents to leave out."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_PART_ROWS = 1 << 24
"""Hashes that are compared at once: about a gigabyte of memory with what sorting needs."""
_CHUNK_ROWS = 1 << 22


def find_duplicates(files: list[Path], /, *, output: Path) -> None:
    """Find the documents whose text has come before in the same corpus; the first one stays.

    Hashes are compared part by part of their range, so that memory is bounded whatever their
    number, but for 8 bytes of each duplicate.

    Args:
        files: files of hashes that `hash-documents` wrote, in the order of the corpus.
        output: file of ordinals to write, for `tokenize --duplicates`.

    Raises:
        UserError: a file is missing or damaged.
    """
    import numpy as np

    from tokamake.data.corpus.document_rows import ORDINAL, RowsWriter, read_table
    from tokamake.errors import UserError
    from tokamake.files import atomic

    if not files:
        raise UserError("find-duplicates: no file given; name at least one")
    tables = [entry for path in files for entry in read_table(path)]
    total = sum(rows for _, rows in tables)
    num_parts = max(1, -(-total // _PART_ROWS))
    found = [_repeated(*part) for part in _parts(files, num_parts)]
    dropped = np.sort(np.concatenate(found))
    with atomic(output) as (temporary,), RowsWriter(temporary) as writer:
        first = 0
        for shard, rows in tables:
            low, high = np.searchsorted(dropped, [first, first + rows])
            writer.add(shard, (dropped[low:high] - first).astype(ORDINAL))
            first += rows
    share = len(dropped) / total if total else 0.0
    print(f"{output}: {len(dropped):,} of {total:,} documents are duplicates ({share:.2%})")


def _parts(
    files: list[Path], num_parts: int
) -> "Iterator[tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]]":
    """Hashes (rows, 2) of each part of their range, with the rows' numbers in the corpus."""
    import numpy as np

    from tokamake.data.corpus.document_rows import HASH, read_rows

    for part in range(num_parts):
        hashes, numbers, first = [np.zeros((0, 2), HASH)], [np.zeros(0, np.int64)], 0
        for path in files:
            rows = read_rows(path, HASH, width=2)
            for start in range(0, len(rows), _CHUNK_ROWS):
                chunk = rows[start : start + _CHUNK_ROWS]
                chosen = np.flatnonzero((chunk[:, 0] >> np.uint64(32)) * num_parts >> 32 == part)
                hashes.append(chunk[chosen])
                numbers.append(chosen + (first + start))
            first += len(rows)
        yield np.concatenate(hashes), np.concatenate(numbers)


def _repeated(
    hashes: "npt.NDArray[np.uint64]", numbers: "npt.NDArray[np.int64]"
) -> "npt.NDArray[np.int64]":
    """Numbers of the rows whose hash an earlier row has; `numbers` ascend."""
    import numpy as np

    order = np.lexsort((hashes[:, 1], hashes[:, 0]))  # stable: among equals, numbers ascend
    ordered = hashes[order]
    same = (ordered[1:] == ordered[:-1]).all(axis=1)
    return numbers[order[1:][same]]
