"""Reads one text column of a parquet file, row group by row group."""

from collections.abc import Iterator
from pathlib import Path

from tokamake.errors import UserError


def accepts(head: bytes, path: Path) -> bool:
    """Take files that begin with parquet's magic."""
    return head.startswith(b"PAR1")


def read(path: Path, text_key: str, byte_range: tuple[int, int | None] | None) -> Iterator[str]:
    """Yield the text of each row; see `tokamake.data.readers.read`."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    if byte_range:
        raise UserError(f"{path}: a parquet file has no byte ranges; read it whole")
    try:
        source = parquet.ParquetFile(path)
        if text_key not in source.schema_arrow.names:
            columns = ", ".join(source.schema_arrow.names)
            raise UserError(f'{path}: no column "{text_key}" among {columns}; fix text_key')
        row = 0
        for batch in source.iter_batches(columns=[text_key]):
            for text in batch.column(0).to_pylist():
                if not isinstance(text, str):
                    raise UserError(f'{path}: row {row}: "{text_key}" holds {text!r}, not text')
                row += 1
                yield text
    except arrow.ArrowException as error:
        raise UserError(f"{path}: cannot be read as parquet ({error}); fetch it again") from None
