"""Lines of texts: the jsonl files that `generate-texts` and `score-texts` write."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from tokamake.errors import UserError


class TextLine(NamedTuple):
    """A line of a file of texts."""

    value: dict[str, Any]
    offset: int
    """Byte at which the line begins."""
    where: str
    """File and line, for messages."""


def read_lines(path: Path) -> Iterator[TextLine]:
    """Yield the lines of a file in order; raises UserError for a line without a text."""
    offset = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                value = _parsed(line)
                if not isinstance(value, dict) or not isinstance(value.get("text"), str):
                    raise UserError(f"{path}:{number}: not an object with a text; fix the line")
                yield TextLine(value, offset, f"{path}:{number}")
                offset += len(line)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); fix the path") from None


def _parsed(line: bytes) -> Any:
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        return None


def toxicity_of(line: TextLine) -> float | None:
    """Score of a line of `score-texts`; raises UserError if it has none."""
    if "toxicity" not in line.value:
        raise UserError(f"{line.where}: no toxicity; score the file with `tokamake score-texts`")
    value: float | None = line.value["toxicity"]
    return value
