"""Rows of tables with tabs, and objects of jsonl files, with their places for messages."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from tokamake.errors import UserError

_LONGEST_FIELD = 2**31 - 1
"""csv's own limit is 128 kB."""


def is_jsonl(path: Path) -> bool:
    return path.suffix in (".jsonl", ".json")


def read_rows(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield `FILE:LINE` and the fields of each row of a tsv file; blank lines are left out.

    Fields may be in double quotes, as csv writes them and DPR's files have them.

    Raises:
        UserError: a line is not UTF-8, or a row is longer than a line.
    """
    csv.field_size_limit(_LONGEST_FIELD)
    reader = csv.reader(_decoded_lines(path), delimiter="\t")
    last = 0
    try:
        for row in reader:
            where = f"{path}:{last + 1}"
            if reader.line_num > last + 1:
                raise UserError(
                    f'{where}: a field begins with a " that its line does not close; put the field '
                    'in double quotes, with each " in it twice, or write jsonl'
                )
            last = reader.line_num
            if row:
                yield where, row
    except csv.Error as error:
        raise UserError(f"{path}:{last + 1}: not a row of a tsv file ({error}); fix it") from None


def read_objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield `FILE:LINE` and the object of each line of a jsonl file; blank lines are left out."""
    for number, line in enumerate(_decoded_lines(path), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            value = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise UserError(f"{where}: not valid JSON ({error}); fix the line") from None
        if not isinstance(value, dict):
            raise UserError(f"{where}: not a JSON object; fix the line")
        yield where, value


def _decoded_lines(path: Path) -> Iterator[str]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    yield line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError:
                    raise UserError(f"{path}:{number}: not UTF-8; convert the file") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); fix the path") from None
