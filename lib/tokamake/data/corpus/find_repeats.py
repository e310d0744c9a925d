"""Stage `find_repeats`: passages that occurred before, by their hashes.

The first passage of each hash is kept, in the order of the files. So the result depends neither on
jobs nor on the parts in which hashes are sorted. Hashes have 64 bits: n different passages contain
a false repeat with a probability of about n² / 2^65, 3 % for a billion.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tokamake.data.corpus.document_rows import HASH, RowsWriter, read_rows, read_table
from tokamake.errors import UserError
from tokamake.files import atomic, emptied

_PART_ROWS = 1 << 24  # passages sorted at once; sorting them takes about 0.8 GB of memory
_CHUNK_ROWS = 1 << 20  # rows read at once
_ENTRY = np.dtype([("hash", HASH), ("row", "<u8")])

Rows = npt.NDArray[Any]


def find_repeats(files: list[Path], /, *, output: Path) -> None:
    """Find lines, paragraphs or sequences of words that occurred before.

    The first occurrence is kept. Memory is about 1 GB, and 24 bytes per repeated passage of a
    shard. The disk of `output` holds up to 17 bytes per passage while the stage runs.

    Args:
        files: files of passages from `hash-passages`, in the order of the corpora.
        output: file of the spans to cut out; an input of `tokenize`.
    """
    # This module imports pydantic, and `--help` should be instant.
    from tokamake.data.corpus.passages import CUT, PASSAGE

    if not files:
        raise UserError("find-repeats: no file given; name at least one")
    tables = [read_table(path, verify=True) for path in files]
    total = sum(rows for table in tables for _, rows in table)
    num_repeats = 0
    with emptied(output.with_name(f".{output.name}.parts")) as folder:
        is_repeat = _mark_repeats(_chunks(files, PASSAGE), folder, total=total)
        with atomic(output) as (temporary,), RowsWriter(temporary) as writer:
            first = 0
            for path, table in zip(files, tables, strict=True):
                start, passages = 0, read_rows(path, PASSAGE)[:, 0]
                for shard, rows in table:
                    marks = is_repeat[first : first + rows]
                    writer.add(shard, _spans(passages[start : start + rows][marks]).astype(CUT))
                    num_repeats += int(np.count_nonzero(marks))
                    first, start = first + rows, start + rows
    share = num_repeats / total if total else 0.0
    print(f"{output}: {num_repeats:,} of {total:,} passages repeat earlier ones ({share:.2%})")


def _chunks(files: list[Path], dtype: np.dtype) -> Iterator[tuple[int, Rows]]:
    """Yield first row and (rows,) hashes, a chunk after the other."""
    first = 0
    for path in files:
        rows = read_rows(path, dtype)
        for start in range(0, len(rows), _CHUNK_ROWS):
            yield first + start, rows[start : start + _CHUNK_ROWS, 0]["hash"]
        first += len(rows)


def _mark_repeats(chunks: Iterator[tuple[int, Rows]], folder: Path, *, total: int) -> Rows:
    """(total,) whether the hash of each row is the hash of an earlier row; a file of `folder`."""
    if not total:
        return np.zeros(0, bool)
    marks = np.memmap(folder / "marks", bool, "w+", shape=(total,))
    num_parts = -(-total // _PART_ROWS)
    for first, hashes in chunks:
        order = np.argsort(hashes, kind="stable")
        entries = np.empty(len(hashes), _ENTRY)
        entries["hash"], entries["row"] = hashes[order], order + first
        # A chunk has each hash once in the parts, so that a frequent one fills no part.
        entries = _mark_and_drop(entries, marks)
        # The top 32 bits as a fraction of 1, times the parts: equal hashes share a part.
        parts = (entries["hash"] >> np.uint64(32)) * np.uint64(num_parts) >> np.uint64(32)
        ends = np.searchsorted(parts, np.arange(1, num_parts, dtype=np.uint64))
        for part, rows in enumerate(np.split(entries, ends)):
            with (folder / str(part)).open("ab") as stream:
                stream.write(rows.data)
    for part in range(num_parts):
        entries = np.fromfile(folder / str(part), _ENTRY)
        # Stable: entries of equal hashes are in the order of their chunks.
        _mark_and_drop(entries[np.argsort(entries["hash"], kind="stable")], marks)
    return marks


def _mark_and_drop(entries: Rows, marks: Rows) -> Rows:
    """Mark all but the first of entries with equal hashes, which are sorted; return the others."""
    is_repeat = np.zeros(len(entries), bool)
    is_repeat[1:] = entries["hash"][1:] == entries["hash"][:-1]
    marks[entries["row"][is_repeat]] = True
    return entries[~is_repeat]


def _spans(passages: Rows) -> Rows:
    """Join passages of a text that touch: their first characters and ends ascend."""
    spans = passages[["document", "text", "begin", "end"]]
    if not len(spans):
        return spans
    texts, begins, ends = spans[["document", "text"]], spans["begin"], spans["end"]
    is_first = np.ones(len(spans), bool)
    is_first[1:] = (texts[1:] != texts[:-1]) | (begins[1:] > ends[:-1])
    starts = np.flatnonzero(is_first)
    joined = spans[starts].copy()
    joined["end"] = ends[np.append(starts[1:], len(spans)) - 1]
    return joined
