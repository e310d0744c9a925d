"""Files of tasks: tables with a tab between columns, as GLUE has them, or JSON lines.

GLUE's tables have no quoting: a quotation mark is text. JSON lines have the names of columns as
keys.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tokamake.errors import UserError
from tokamake.train.objectives.classification.data import Example

_JSON = (".jsonl", ".json")


class _Row(NamedTuple):
    where: str
    cells: Mapping[str, str | None]


@dataclass(frozen=True)
class TextTable:
    """Columns of a task's files."""

    first: str
    """Column of the first text."""
    second: str | None = None
    """Column of the second text."""
    label: str = "label"
    """Column of the label; files without it have no labels."""
    columns: tuple[str, ...] = ()
    """Names of the columns of files that have no line with these names."""
    skips_damaged: bool = False
    """Whether lines with other numbers of columns are left out. Otherwise, they are an error."""

    def read(self, path: Path, settings: Mapping[str, Any]) -> Iterator[Example]:  # noqa: ARG002
        """Read a file; `settings`: settings of the task."""
        rows = _json_rows(path) if path.suffix in _JSON else self._table_rows(path)
        for where, cells in rows:
            texts = [self._text(cells, name, where=where) for name in self._text_columns]
            second = texts[1] if self.second else None
            yield Example((texts[0],), second, cells.get(self.label), where)

    @property
    def _text_columns(self) -> list[str]:
        return [name for name in (self.first, self.second) if name]

    def _text(self, cells: Mapping[str, str | None], name: str, *, where: str) -> str:
        text = cells.get(name)
        if text is None:
            raise UserError(
                f"{where}: has no {name}, only {', '.join(cells)}; name a file of this task"
            )
        return text

    def _table_rows(self, path: Path) -> Iterator[_Row]:
        names: list[str] = []
        num_damaged = 0
        for number, cells in _lines(path):
            if not names:
                names = self._names(cells, where=f"{path}:{number}")
                if names == cells:
                    continue
            if len(cells) != len(names):
                if not self.skips_damaged:
                    raise UserError(
                        f"{path}:{number}: has {len(cells)} columns instead of {len(names)}; fix "
                        "the line, or fetch the file again"
                    )
                num_damaged += 1
                continue
            yield _Row(f"{path}:{number}", dict(zip(names, cells, strict=True)))
        if num_damaged:
            print(f"{path}: {num_damaged:,} lines with missing columns left out", flush=True)

    def _names(self, cells: list[str], *, where: str) -> list[str]:
        """Names of the columns, by the first line of a file."""
        if {*self._text_columns} <= {*cells}:
            return cells
        if self.columns and len(cells) == len(self.columns):
            return [*self.columns]
        raise UserError(
            f"{where}: has the columns {', '.join(cells)[:80]}, without "
            f"{' and '.join(self._text_columns)}; name a file of this task"
        )


def _lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Lines with their numbers, divided at tabs. Only \\n ends a line: texts may have a \\r."""
    with path.open(encoding="utf-8-sig", newline="\n") as stream:
        try:
            for number, line in enumerate(stream, 1):
                if line := line.rstrip("\r\n"):
                    yield number, line.split("\t")
        except UnicodeDecodeError:
            raise UserError(f"{path}: not UTF-8; fetch it again") from None


def _json_rows(path: Path) -> Iterator[_Row]:
    for where, value in json_lines(path):
        yield _Row(where, {key: _shown(each) for key, each in value.items()})


def json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Objects of a file of JSON lines, each with its file and line."""
    with path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except ValueError:
                value = None
            if not isinstance(value, dict):
                raise UserError(f"{path}:{number}: not a JSON object; fix the line")
            yield f"{path}:{number}", value


def _shown(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value)
