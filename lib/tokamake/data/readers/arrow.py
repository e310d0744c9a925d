"""Reader of columns of Arrow IPC: streams (as `datasets` saves them) and files (Feather 2)."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokamake.data.readers._input import Input
from tokamake.data.readers._records import RecordBlock
from tokamake.data.readers._table import (
    blocks,
    check_columns,
    damaged,
    schema_columns,
    table_errors,
)
from tokamake.runtime.cores import prefetched

UNIT = "row"
HAS_MAGIC = True
HAS_BYTE_RANGES = False
READS_COLUMNS = True

_CONTINUATION = b"\xff\xff\xff\xff"  # begins each message of a stream; its length follows
_END_OF_STREAM = _CONTINUATION + bytes(4)
_FILE_MAGIC = b"ARROW1"


def accepts(head: bytes, path: Path) -> bool:
    """Accept content that begins with the magic of an IPC file or the schema of a stream."""
    length = int.from_bytes(head[4:8], "little")
    # A stream has no magic. A plausible schema length excludes other files.
    is_stream = head.startswith(_CONTINUATION) and 0 <= length < 1 << 28 and length % 8 == 0
    return head.startswith(_FILE_MAGIC) or is_stream


def columns(raw: Input) -> dict[str, bool]:
    """Names of the columns, and whether they hold texts."""
    import pyarrow as arrow

    with table_errors(raw), arrow.OSFile(str(raw.path)) as source:
        return schema_columns(_schema(raw, source))


def read(raw: Input, keys: tuple[str, ...]) -> Iterator[RecordBlock]:
    """Yield the rows of all record batches as blocks."""
    first_row = 0
    with table_errors(raw):
        for batch in prefetched(_batches(raw, keys)):
            yield from blocks(batch, keys, first_row)
            first_row += batch.num_rows
        raw.count()


def _schema(raw: Input, source: Any) -> Any:
    from pyarrow import ipc

    is_file = raw.head.startswith(_FILE_MAGIC)
    return (ipc.open_file if is_file else ipc.open_stream)(source).schema


def _batches(raw: Input, keys: tuple[str, ...]) -> Iterator[Any]:
    import pyarrow as arrow
    from pyarrow import ipc

    is_file = raw.head.startswith(_FILE_MAGIC)
    with arrow.OSFile(str(raw.path)) as source:
        # Columns are selected by index, so the schema comes first. Then read from the beginning.
        schema = _schema(raw, source)
        check_columns(raw, schema.names, keys=keys, schema=schema)
        options = ipc.IpcReadOptions(
            included_fields=[
                schema.get_field_index(key if key in schema.names else key.partition(".")[0])
                for key in keys
            ],
            use_threads=False,
        )
        source.seek(0)
        if is_file:
            table = ipc.open_file(source, options=options)
            for number in range(table.num_record_batches):
                yield _validated(table.get_batch(number))
            return
        yield from map(_validated, ipc.open_stream(source, options=options))
        size = source.size()
        if source.tell() != size or not _has_end_mark(raw.path):
            raise damaged(raw, f"its stream ends at byte {source.tell()} of {size}")


def _validated(batch: Any) -> Any:
    """Return the batch if its offsets point into its buffers; Arrow does not check a file's."""
    import pyarrow as arrow

    for column in batch.columns:
        try:
            column.validate(full=True)
        except arrow.ArrowInvalid as error:
            # Arrow checks UTF-8 last, so the offsets are valid. Each bad text is one bad row.
            if "UTF8" not in str(error):
                raise
    return batch


def _has_end_mark(path: Path) -> bool:
    """Whether a stream ends with its end mark; Arrow accepts a stream cut between two batches."""
    with path.open("rb") as stream:
        stream.seek(-len(_END_OF_STREAM), os.SEEK_END)
        return stream.read() == _END_OF_STREAM
