"""Reader of any file that `datasets.load_dataset` opens, such as FASTA, streamed as a table.

The config names this format; no file is detected as such. `datasets` chooses its own reader by the
name of the file. It needs no network for files on disk.
"""

import glob
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokamake.data.readers._input import Input
from tokamake.data.readers._records import RecordBlock
from tokamake.data.readers._table import blocks, check_columns, damaged
from tokamake.errors import UserError

UNIT = "row"
HAS_MAGIC = False
HAS_BYTE_RANGES = False
READS_COLUMNS = True
IS_NAMED_ONLY = True

_BATCH_ROWS = 1000


def accepts(head: bytes, path: Path) -> bool:
    return False


def read(raw: Input, keys: tuple[str, ...]) -> Iterator[RecordBlock]:
    """Yield the rows in the order of `datasets`, as blocks."""
    first_row = 0
    for table in _tables(raw):
        check_columns(raw, table.schema.names, keys=keys, schema=table.schema)
        for batch in table.combine_chunks().to_batches():
            yield from blocks(batch, keys, first_row)
            first_row += batch.num_rows
    raw.count()


def _tables(raw: Input) -> Iterator[Any]:
    """Yield Arrow tables of some rows each; no image or recording is decoded."""
    try:
        from datasets import load_dataset
    except ImportError:
        raise UserError(
            f"{raw.path}: the format datasets needs a package; pip install 'tokamake[datasets]'"
        ) from None
    try:
        rows = load_dataset(
            str(raw.path.parent),
            data_files={"train": glob.escape(raw.path.name)},
            split="train",
            streaming=True,
        )
        yield from rows.with_format("arrow").iter(batch_size=_BATCH_ROWS)
    except Exception as error:  # each of its readers has errors of its own
        raise damaged(raw, f"{type(error).__name__}: {error}") from None
