"""The weighting file: which token files a mixture draws from, and how much from each.

`weigh` and `mix` write it, or a user by hand: lines of `weight prefix corpus`. `index`, `evaluate`
and `plot` read it, `lint_weights` checks it.
"""

import math
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

from tokamake.config.resolved_run import ROOT_VARIABLE
from tokamake.data.corpus.splits import Part, parse_part
from tokamake.data.indexed.paths import corpus_of
from tokamake.errors import UserError
from tokamake.files import write_text

_PART = re.compile(r"[-+.\deE]+:[-+.\deE]+")
_FORMS = "write `weight prefix corpus [START:END]`, or pairs of `weight prefix`"


class Weighted(NamedTuple):
    """One token file: a share relative to the others, a pair without .bin, and its corpus."""

    weight: float
    prefix: str
    corpus: str
    part: Part | None = None
    """Documents of the pair that are meant, as shares of them; None: what a split leaves."""


class Line(NamedTuple):
    """Where and how an entry is written."""

    number: int
    """Line of the file, from 1."""
    columns: int
    """3, or 2 where the corpus is not named; a part does not count."""
    weight: str
    """The weight as it is written."""
    entry: Weighted


class Problem(NamedTuple):
    """What is wrong in a weighting file, and the remedy."""

    number: int
    """Line of the file, from 1; 0 where it is the file as a whole."""
    text: str
    error: bool = True
    """Whether it has to be mended, or is only worth a word."""


def read_weights(path: Path) -> list[Weighted]:
    """Read a weighting file: `weight prefix corpus` a line, or one or more pairs `weight prefix`.

    A fourth column, START:END, says which part of the pair's documents is meant.
    Pairs are what Megatron takes as --data-path; without a column for it, the corpus is the
    prefix's last part up to its first hyphen. A `.bin` at the end of a prefix is taken off. Blank
    lines and what follows a `#` at the beginning of a column are skipped.

    Raises:
        UserError: the file is missing, empty or no text, a line has another form, a weight is
            negative or not finite, a part is none, a prefix comes twice, or all weights are zero.
    """
    lines, problems = scan(path)
    if problems:
        raise UserError(place(path, problems[0].number) + problems[0].text)
    return [line.entry for line in lines]


def scan(path: Path) -> tuple[list[Line], list[Problem]]:
    """Read a weighting file with all that is wrong in it; entries of bad weights are kept.

    Raises:
        UserError: the file is missing or no text.
    """
    lines: list[Line] = []
    problems: list[Problem] = []
    places: dict[str, int] = {}
    for number, text in enumerate(_read(path).splitlines(), 1):
        groups = _groups(_columns(text))
        if groups is None:
            problems.append(Problem(number, f"{len(_columns(text))} columns; {_FORMS}"))
        for group in groups or []:
            try:
                line = _parse(number, group)
            except UserError as error:
                problems.append(Problem(number, str(error)))
                continue
            if not 0 <= line.entry.weight < math.inf:
                what = f"weight {line.weight!r}; give a finite number, 0 or more"
                problems.append(Problem(number, what))
            prefix = line.entry.prefix
            if (name := os.path.normpath(prefix)) in places:
                what = f"{prefix} stands in line {places[name]} too; join the lines"
                problems.append(Problem(number, what))
            else:
                places[name] = number
                lines.append(line)
    if not any(line.entry.weight > 0 for line in lines):
        problems.append(Problem(0, "no weight above 0; add lines of `weight prefix corpus`"))
    if sum(line.entry.weight for line in lines if line.entry.weight < math.inf) == math.inf:
        problems.append(Problem(0, "weights sum to more than any number; make them smaller"))
    return lines, problems


def write_weights(path: Path, entries: Iterable[Weighted], *, columns: Literal[2, 3] = 3) -> None:
    """Write a weighting file; every weight keeps its full precision.

    Raises:
        UserError: a prefix cannot stand in such a file, or a part of a pair not in two columns.
    """
    lines = []
    for entry in entries:
        if _columns(entry.prefix) != [entry.prefix]:
            raise UserError(
                f"{path}: {entry.prefix!r} cannot stand in a weighting file, for it has a space in "
                "it or begins with #; rename it"
            )
        if columns == 2 and entry.part:
            raise UserError(
                f"{path}: a part of {entry.prefix} is meant, which takes three columns to say"
            )
        if columns == 2:
            lines.append(f"{entry.weight!r} {entry.prefix}\n")
            continue
        part = f" {entry.part[0]!r}:{entry.part[1]!r}" if entry.part else ""
        lines.append(f"{entry.weight!r} {entry.prefix} {entry.corpus}{part}\n")
    write_text(path, "".join(lines))


def find_root(path: Path, given: Path | None) -> Path:
    """Folder that prefixes count from: the given one, that of ROOT_VARIABLE, or the file's own."""
    named = os.environ.get(ROOT_VARIABLE)
    return given or (Path(named) if named else path.parent)


def place(path: Path, number: int) -> str:
    """Where a problem stands, for the beginning of a message."""
    return f"{path}:{number}: " if number else f"{path}: "


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; make it with `tokamake weigh`") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error}); mend it") from None


def _columns(text: str) -> list[str]:
    """Columns of a line up to a comment."""
    columns = text.split()
    starts = (number for number, column in enumerate(columns) if column.startswith("#"))
    return columns[: next(starts, None)]


def _groups(columns: list[str]) -> list[list[str]] | None:
    """The entries of a line, each of two or three columns and a part; None: it is no such line."""
    if len(columns) == 3 or (len(columns) == 4 and _PART.fullmatch(columns[3])):
        return [columns]
    pairs = [columns[start : start + 2] for start in range(0, len(columns), 2)]
    # Of a single pair the weight may be a slip; several are known as pairs by their numbers.
    numbers = len(pairs) < 2 or all(_is_number(pair[0]) for pair in pairs)
    return pairs if len(columns) % 2 == 0 and numbers else None


def _parse(number: int, group: list[str]) -> Line:
    weight = float(group[0]) if _is_number(group[0]) else math.nan
    prefix = group[1].removesuffix(".bin")
    corpus = group[2] if len(group) > 2 else corpus_of(prefix)
    part = parse_part(group[3]) if len(group) > 3 else None
    return Line(number, min(len(group), 3), group[0], Weighted(weight, prefix, corpus, part))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
