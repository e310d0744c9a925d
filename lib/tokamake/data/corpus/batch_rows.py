"""Rows of the documents of a job batch. A job that was killed goes on with the next shard.

A hidden folder beside the output has a file for each finished shard, until the output is whole.
"""

import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tokamake import files
from tokamake.data.corpus.document_rows import RowsWriter, read_rows, read_table
from tokamake.data.corpus.plan_file import PlannedShard
from tokamake.errors import UserError

_CHUNK_ROWS = 1 << 20


def write_batch_rows(
    output: Path,
    shards: Iterable[tuple[PlannedShard, Iterable[npt.NDArray[Any]]]],
    *,
    dtype: np.dtype,
    width: int = 1,
    made_from: Mapping[str, Any],
) -> int:
    """Write the rows of all shards of a batch, and return their number.

    Args:
        output: file of rows to write.
        shards: shards with their rows, in blocks, which are not read of finished shards.
        dtype: type of the numbers of a row.
        width: numbers of a row.
        made_from: settings and other values, as JSON, that decide the rows of a shard beside its
            raw files. Shards that were finished with other values are made again.
    """
    parts = output.with_name(f".{output.name}.parts")
    num_rows = num_finished = 0
    try:
        with files.atomic(output) as (temporary,), RowsWriter(temporary) as writer:
            for shard, blocks in shards:
                writer.add(shard.name, np.zeros(0, dtype))
                part = parts / files.digest([made_from, shard])
                if (finished := _finished(part, dtype, width=width)) is not None:
                    num_finished += 1
                    blocks = _chunks(finished)
                else:
                    blocks = _kept(part, shard, blocks, dtype=dtype)
                for rows in blocks:
                    writer.add(shard.name, rows)
                    num_rows += len(rows)
    except BaseException:
        with suppress(OSError):  # it has finished shards
            parts.rmdir()
        raise
    shutil.rmtree(parts, ignore_errors=True)
    if num_finished:
        print(f"{output}: {num_finished:,} shards were finished by an earlier job")
    return num_rows


def _finished(part: Path, dtype: np.dtype, *, width: int) -> npt.NDArray[Any] | None:
    """Rows of a shard that an earlier job finished, if their file is whole."""
    try:
        read_table(part, verify=True)
    except UserError:
        return None
    return read_rows(part, dtype, width=width)


def _chunks(rows: npt.NDArray[Any]) -> Iterator[npt.NDArray[Any]]:
    for start in range(0, len(rows), _CHUNK_ROWS):
        yield rows[start : start + _CHUNK_ROWS]


def _kept(
    part: Path, shard: PlannedShard, blocks: Iterable[npt.NDArray[Any]], *, dtype: np.dtype
) -> Iterator[npt.NDArray[Any]]:
    """Yield the rows of a shard; its file is there once the last ones were taken."""
    part.parent.mkdir(exist_ok=True)
    with files.atomic(part) as (temporary,), RowsWriter(temporary) as writer:
        writer.add(shard.name, np.zeros(0, dtype))
        for rows in blocks:
            writer.add(shard.name, rows)
            yield rows
