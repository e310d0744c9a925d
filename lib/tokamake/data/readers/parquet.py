"""Reads columns of a parquet file in batches; a range holds the row groups that begin in it."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokamake.data.readers._records import RecordBlock
from tokamake.data.readers._table import BLOCK_BYTES, blocks, check_columns, damaged, opening
from tokamake.runtime.cores import ahead

if TYPE_CHECKING:
    from tokamake.data.readers import Input

UNIT = "row"
SPLITS = True


def accepts(head: bytes, path: Path) -> bool:
    """Take files that begin with parquet's magic."""
    return head.startswith(b"PAR1")


def read(raw: "Input", keys: tuple[str, ...]) -> Iterator[RecordBlock]:
    """Yield the rows of the row groups whose first byte lies in the range, as blocks."""
    import pyarrow.parquet as parquet

    with opening(raw):
        with parquet.ParquetFile(
            raw.path, buffer_size=1 << 20, page_checksum_verification=True
        ) as source:
            check_columns(raw, source.schema_arrow.names, keys)
            first_row = 0
            for group in range(source.metadata.num_row_groups):
                metadata = source.metadata.row_group(group)
                if _begins_in(raw, metadata):
                    yield from _group(raw, source, group, keys, first_row)
                first_row += metadata.num_rows
        raw.count()


def _begins_in(raw: "Input", group: Any) -> bool:
    """Whether a row group's first byte, that of its columns' first page, lies in the range."""
    if not raw.start and raw.end is None:
        return True  # pyarrow aborts on some damaged footers when asked for columns
    columns = map(group.column, range(group.num_columns))
    first = min(
        min(column.dictionary_page_offset or column.data_page_offset, column.data_page_offset)
        for column in columns
    )
    return bool(raw.start <= first and (raw.end is None or first < raw.end))


def _group(
    raw: "Input", source: Any, group: int, keys: tuple[str, ...], first_row: int
) -> Iterator[RecordBlock]:
    metadata = source.metadata.row_group(group)
    rows = 0
    for batch in ahead(
        source.iter_batches(
            _batch_rows(metadata), row_groups=[group], columns=list(keys), use_threads=False
        )
    ):
        yield from blocks(batch, keys, first_row + rows)
        rows += batch.num_rows
    if rows != metadata.num_rows:
        raise damaged(
            raw, f"{rows} rows in row group {group}, which should have {metadata.num_rows}"
        )


def _batch_rows(group: Any) -> int:
    """Rows of about a block of text; a group's size tells it, all columns included."""
    average = max(1, group.total_byte_size // max(1, group.num_rows))
    return int(min(1 << 14, max(1, BLOCK_BYTES // average)))
