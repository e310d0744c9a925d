"""The weighting file: which token files a mixture draws from, and how much from each.

`weigh` writes it, or a user by hand: lines of `weight prefix corpus`. `index` reads it.
"""

import math
from pathlib import Path
from typing import NamedTuple

from tokamake.errors import UserError


class Weighted(NamedTuple):
    """One line: a share relative to the others, a pair without .bin, and its corpus."""

    weight: float
    prefix: str
    corpus: str


def read_weights(path: Path) -> list[Weighted]:
    """Read a weighting file; blank lines are skipped.

    Raises:
        UserError: the file is missing, empty or no text, a line is not `weight prefix corpus`, a
            weight is negative or not finite, a prefix comes twice, or all weights are zero.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; make it with `tokamake weigh`") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error}); mend it") from None
    places: dict[str, int] = {}
    entries = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        entry = _parse(line, f"{path}:{number}")
        earlier = places.setdefault(entry.prefix, number)
        if earlier != number:
            raise UserError(
                f"{path}:{number}: {entry.prefix} stands in line {earlier} too; join the lines"
            )
        entries.append(entry)
    if not sum(entry.weight for entry in entries) > 0:
        raise UserError(f"{path}: no weight above 0; add lines of `weight prefix corpus`")
    return entries


def _parse(line: str, where: str) -> Weighted:
    fields = line.split()
    if len(fields) != 3:
        raise UserError(f"{where}: {len(fields)} columns; write `weight prefix corpus`")
    try:
        weight = float(fields[0])
    except ValueError:
        weight = math.nan
    if not 0 <= weight < math.inf:
        raise UserError(f"{where}: weight {fields[0]!r}; give a finite number, 0 or more")
    return Weighted(weight, fields[1], fields[2])
