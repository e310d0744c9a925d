"""Code shared by the readers of tables: turns columns of tables into blocks."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tokamake.data.readers._input import Input
from tokamake.data.readers._records import BadRecord, RecordBlock, row_block, utf8_fault
from tokamake.errors import UserError

BLOCK_BYTES = 1 << 22
_MAX_ROWS = 1 << 16


@contextmanager
def table_errors(raw: Input) -> Iterator[None]:
    """Refuse compressed tables, and turn Arrow's errors into `UserError`."""
    import pyarrow as arrow

    if raw.compression:
        raise UserError(
            f"{raw.path}: a {raw.format} file inside {raw.compression} cannot be read; unpack it"
        )
    try:
        yield
    except (arrow.ArrowException, OSError, ValueError) as error:
        raise damaged(raw, str(error)) from None


def damaged(raw: Input, fault: str) -> UserError:
    summary = " ".join(fault.split())[:300]
    return UserError(
        f"{raw.path}: cannot be read as {raw.format} ({summary}); fetch it again: the lost "
        "documents cannot be counted"
    )


def check_columns(
    raw: Input, names: list[str], *, keys: tuple[str, ...], schema: Any = None
) -> None:
    """Refuse a table unless each key names exactly one column, or a field of a struct's column."""
    for key in keys:
        if names.count(key) != 1 and not (key not in names and _is_nested(schema, key)):
            count = "more than one" if key in names else "no"
            setting = "the filters" if key in raw.metadata_keys else "text_key"
            raise UserError(
                f'{raw.path}: {count} column "{key}" among {", ".join(names)}; fix {setting}'
            )


def schema_columns(schema: Any, prefix: str = "") -> dict[str, bool]:
    """Names of columns, and whether they hold texts; `meta.text` is the field `text` of `meta`."""
    import pyarrow as arrow

    columns: dict[str, bool] = {}
    for field in schema:
        kind = field.type
        if arrow.types.is_dictionary(kind):
            kind = kind.value_type
        if arrow.types.is_struct(kind):
            columns |= schema_columns(kind, f"{prefix}{field.name}.")
        else:
            is_text = arrow.types.is_string(kind) or arrow.types.is_large_string(kind)
            columns[f"{prefix}{field.name}"] = is_text
    return columns


def _is_nested(schema: Any, key: str) -> bool:
    """Whether `meta.text` names the field `text` of a column `meta`."""
    import pyarrow as arrow

    parent = schema and arrow.struct(schema)
    for part in key.split("."):
        if not (parent and arrow.types.is_struct(parent)) or parent.get_field_index(part) < 0:
            return False
        parent = parent.field(part).type
    return True


def _column(batch: Any, key: str) -> Any:
    import pyarrow.compute

    if key in batch.schema.names:
        return batch.column(key)
    return pyarrow.compute.struct_field(batch.to_struct_array(), key.split("."))


def blocks(batch: Any, keys: tuple[str, ...], first_row: int) -> Iterator[RecordBlock]:
    """Cut a record batch with the columns `keys` into blocks."""
    average_bytes = max(1, batch.nbytes // max(1, batch.num_rows))
    step = min(_MAX_ROWS, max(1, BLOCK_BYTES // average_bytes))
    for start in range(0, batch.num_rows, step):
        part = batch.slice(start, step)
        columns = [_values(_column(part, key)) for key in keys]
        yield row_block(_records(columns, keys), first_row + start)


def _records(columns: list[list[Any]], keys: tuple[str, ...]) -> list[dict[str, Any] | BadRecord]:
    records: list[dict[str, Any] | BadRecord]
    if len(keys) == 1:
        records = [{keys[0]: value} for value in columns[0]]
    else:
        records = [dict(zip(keys, row, strict=True)) for row in zip(*columns, strict=True)]
    for column in columns:
        if BadRecord in set(map(type, column)):  # bad values are rare; do not test each one
            for index, value in enumerate(column):
                if isinstance(value, BadRecord):
                    records[index] = value
    return records


def _values(column: Any) -> list[Any]:
    """Return the Python values of a column; bytes become text, or a `BadRecord` if not UTF-8."""
    import pyarrow as arrow

    if arrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()  # ten times faster than a lookup for each value
    try:
        values = column.to_pylist()
    except UnicodeDecodeError:  # a string column with a bad value: convert value by value
        values = [_value(scalar) for scalar in column]
    if bytes in set(map(type, values)):
        values = [_text(value) if isinstance(value, bytes) else value for value in values]
    return values


def _value(scalar: Any) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError as error:
        return not_utf8(error)


def _text(value: bytes) -> str | BadRecord:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        return not_utf8(error)


def not_utf8(error: UnicodeDecodeError) -> BadRecord:
    return BadRecord(f"{utf8_fault(error, ' of the value')}; fix or remove the row", error.object)
