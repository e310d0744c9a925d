"""Reads columns of Arrow IPC files: streams, as `datasets` saves, and files (Feather 2)."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokamake.data.readers._records import RecordBlock
from tokamake.data.readers._table import blocks, check_columns, damaged, opening
from tokamake.runtime.cores import ahead

if TYPE_CHECKING:
    from tokamake.data.readers import Input

UNIT = "row"
SPLITS = False

_CONTINUATION = b"\xff\xff\xff\xff"
_END_OF_STREAM = _CONTINUATION + bytes(4)
_FILE_MAGIC = b"ARROW1"


def accepts(head: bytes, path: Path) -> bool:
    """Take files that begin with the file format's magic or with the message of a schema."""
    length = int.from_bytes(head[4:8], "little")
    stream = head.startswith(_CONTINUATION) and 0 <= length < 1 << 28 and length % 8 == 0
    return head.startswith(_FILE_MAGIC) or stream


def read(raw: "Input", keys: tuple[str, ...]) -> Iterator[RecordBlock]:
    """Yield the rows of all record batches as blocks."""
    first_row = 0
    with opening(raw):
        for batch in ahead(_batches(raw, keys)):
            yield from blocks(batch, keys, first_row)
            first_row += batch.num_rows
        raw.count()


def _batches(raw: "Input", keys: tuple[str, ...]) -> Iterator[Any]:
    import pyarrow as arrow
    from pyarrow import ipc

    is_file = raw.head.startswith(_FILE_MAGIC)
    with arrow.OSFile(str(raw.path)) as source:
        schema = (ipc.open_file if is_file else ipc.open_stream)(source).schema
        check_columns(raw, schema.names, keys)
        options = ipc.IpcReadOptions(
            included_fields=[schema.get_field_index(key) for key in keys], use_threads=False
        )
        source.seek(0)
        if is_file:
            table = ipc.open_file(source, options=options)
            for number in range(table.num_record_batches):
                yield _valid(table.get_batch(number))
            return
        yield from map(_valid, ipc.open_stream(source, options=options))
        size = source.size()
        if source.tell() != size or not _ends(raw.path):
            raise damaged(raw, f"its stream ends at byte {source.tell()} of {size}")


def _valid(batch: Any) -> Any:
    """The batch, if its offsets point into its bytes: Arrow itself trusts what a file says."""
    import pyarrow as arrow

    for column in batch.columns:
        try:
            column.validate(full=True)
        except arrow.ArrowInvalid as error:
            if "UTF8" not in str(error):  # checked last: text that is none is one bad row each
                raise
    return batch


def _ends(path: Path) -> bool:
    """Whether a stream has its end mark; to a reader, one cut between two batches is whole."""
    with path.open("rb") as stream:
        stream.seek(-len(_END_OF_STREAM), os.SEEK_END)
        return stream.read() == _END_OF_STREAM
