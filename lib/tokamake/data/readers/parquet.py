"""Reader of columns of a parquet file. A byte range holds the row groups that begin in it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokamake.data.readers._input import Input
from tokamake.data.readers._records import RecordBlock
from tokamake.data.readers._table import (
    BLOCK_BYTES,
    blocks,
    check_columns,
    damaged,
    schema_columns,
    table_errors,
)
from tokamake.runtime.cores import prefetched

UNIT = "row"
HAS_MAGIC = True
HAS_BYTE_RANGES = True
READS_COLUMNS = True

_MAX_BATCH_ROWS = 1 << 14


def accepts(head: bytes, path: Path) -> bool:
    return head.startswith(b"PAR1")


def columns(raw: Input) -> dict[str, bool]:
    """Names of the columns, and whether they hold texts."""
    import pyarrow.parquet as parquet

    with table_errors(raw):
        return schema_columns(parquet.read_schema(raw.path))


def read(raw: Input, keys: tuple[str, ...]) -> Iterator[RecordBlock]:
    """Yield the rows of the row groups whose first byte lies in the range, as blocks."""
    import pyarrow.parquet as parquet

    with table_errors(raw):
        with parquet.ParquetFile(
            raw.path, buffer_size=1 << 20, page_checksum_verification=True
        ) as source:
            schema = source.schema_arrow
            check_columns(raw, schema.names, keys=keys, schema=schema)
            first_row = 0
            for group in range(source.metadata.num_row_groups):
                metadata = source.metadata.row_group(group)
                if _begins_in_range(raw, metadata):
                    yield from _row_group(raw, source, group=group, keys=keys, first_row=first_row)
                first_row += metadata.num_rows
        raw.count()


def _begins_in_range(raw: Input, metadata: Any) -> bool:
    """Whether the first page of a row group's columns begins in the byte range."""
    if not raw.start and raw.end is None:
        return True  # pyarrow aborts on some damaged footers when asked for columns
    columns = map(metadata.column, range(metadata.num_columns))
    first_byte = min(
        # Without a dictionary page, its offset is None or 0.
        min(column.dictionary_page_offset or column.data_page_offset, column.data_page_offset)
        for column in columns
    )
    return bool(raw.start <= first_byte and (raw.end is None or first_byte < raw.end))


def _row_group(
    raw: Input, source: Any, *, group: int, keys: tuple[str, ...], first_row: int
) -> Iterator[RecordBlock]:
    metadata = source.metadata.row_group(group)
    num_rows = 0
    for batch in prefetched(
        source.iter_batches(
            _batch_rows(metadata), row_groups=[group], columns=list(keys), use_threads=False
        )
    ):
        yield from blocks(batch, keys, first_row + num_rows)
        num_rows += batch.num_rows
    if num_rows != metadata.num_rows:
        raise damaged(
            raw, f"{num_rows} rows in row group {group}, which should have {metadata.num_rows}"
        )


def _batch_rows(metadata: Any) -> int:
    """Number of rows in about a block, estimated from the bytes of all columns of a row group."""
    average_bytes = max(1, metadata.total_byte_size // max(1, metadata.num_rows))
    return int(min(_MAX_BATCH_ROWS, max(1, BLOCK_BYTES // average_bytes)))
