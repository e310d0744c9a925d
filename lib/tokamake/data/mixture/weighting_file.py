"""The weighting file: datasets of a mixture and their weights, `weight prefix corpus` a line.

`weigh` and `mix` write it, or you write it by hand. `index` and `evaluate` read it; `lint_weights`
checks it.
"""

import math
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

from tokamake.config.resolved_run import ROOT_VARIABLE, divide_root
from tokamake.data.corpus.splits import FractionRange, parse_part
from tokamake.data.indexed.paths import bin_path, corpus_of, idx_path
from tokamake.errors import UserError
from tokamake.files import is_stream, write_text

_PART = re.compile(r"[-+.\deE]+:[-+.\deE]+")
_FORMS = "write `weight prefix corpus [START:END]`, or pairs of `weight prefix`"


class WeightedPrefix(NamedTuple):
    """One dataset of a mixture."""

    weight: float
    """Share of the training samples, relative to the other datasets."""
    prefix: str
    corpus: str
    part: FractionRange | None = None
    """Documents to draw from, as shares of all; None: the split decides."""


class Line(NamedTuple):
    """An entry of a weighting file, and its position and form there."""

    number: int
    columns: int
    """3, or 2 if the line does not name the corpus; a part does not count."""
    weight: str
    entry: WeightedPrefix


class Problem(NamedTuple):
    """A problem in a weighting file, and its remedy."""

    number: int
    """Line number, from 1; 0 for a problem of the whole file."""
    text: str
    error: bool = True
    """False: a warning."""


def read_weighting_file(path: Path) -> list[WeightedPrefix]:
    """Read a weighting file: `weight prefix corpus` a line, or one or more `weight prefix`.

    A fourth column, START:END, names a part of the dataset's documents. Several `weight prefix` on
    a line are Megatron's --data-path; the corpus is then the last path component of the prefix up
    to its number (<corpus>-<number>). A `.bin` at the end of a prefix is removed. Blank lines
    are skipped, and a column that begins with `#` starts a comment.
    """
    lines, problems = scan(path)
    if problems:
        raise UserError(location(path, problems[0].number) + problems[0].text)
    return [line.entry for line in lines]


def scan(path: Path) -> tuple[list[Line], list[Problem]]:
    """Read a weighting file and collect all its problems; keep entries with invalid weights."""
    lines: list[Line] = []
    problems: list[Problem] = []
    first_lines: dict[str, int] = {}
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
                problem = f"weight {line.weight!r}; give a finite number, 0 or more"
                problems.append(Problem(number, problem))
            prefix = line.entry.prefix
            if (name := os.path.normpath(prefix)) in first_lines:
                problem = f"{prefix} is also in line {first_lines[name]}; join the lines"
                problems.append(Problem(number, problem))
            else:
                first_lines[name] = number
                lines.append(line)
    if not any(line.entry.weight > 0 for line in lines):
        problems.append(Problem(0, "no weight above 0; add lines of `weight prefix corpus`"))
    if sum(line.entry.weight for line in lines if line.entry.weight < math.inf) == math.inf:
        problems.append(Problem(0, "the sum of the weights is too large for a float; reduce them"))
    return lines, problems


def write_weighting_file(
    path: Path, entries: Iterable[WeightedPrefix], *, columns: Literal[2, 3] = 3
) -> None:
    """Write a weighting file; every weight keeps its full precision."""
    lines = []
    for entry in entries:
        # A prefix that `read_weighting_file` would not read as one column must not be written.
        if _columns(entry.prefix) != [entry.prefix]:
            raise UserError(
                f"{path}: cannot write {entry.prefix!r}: it is empty, has a space, or begins with "
                "#; rename it"
            )
        if columns == 2 and entry.part:
            raise UserError(
                f"{path}: the line of {entry.prefix} has a range of documents, which two columns "
                "cannot express; write three columns"
            )
        if columns == 2:
            lines.append(f"{entry.weight!r} {entry.prefix}\n")
            continue
        part = f" {entry.part[0]!r}:{entry.part[1]!r}" if entry.part else ""
        lines.append(f"{entry.weight!r} {entry.prefix} {entry.corpus}{part}\n")
    write_text(path, "".join(lines))


def find_root(path: Path, data_root: Path | None) -> Path:
    """Return the folder that the prefixes of a weighting file are relative to.

    It is `data_root` if given, else the value of ROOT_VARIABLE, else the folder of the file; for a
    device or a pipe, the current folder.
    """
    variable = os.environ.get(ROOT_VARIABLE)
    folder = Path() if is_stream(path) else path.parent
    return data_root or (Path(variable) if variable else folder)


def find_prefix(prefix: str, root: Path, *, search: bool) -> str:
    """Return the path of a prefix, normalized; look for a missing absolute one if `search`.

    A list from another machine then needs only the folder: /old/data/web/a becomes the first path
    of ROOT/old/data/web/a, ROOT/data/web/a, ROOT/web/a and ROOT/a that exists. The same holds below
    the folder of ROOT_VARIABLE. If one of them is OLD=NEW, NEW takes the place of OLD.

    Args:
        root: folder of relative prefixes.
        search: whether a person gave it. The folder of a list may contain other datasets of
            the same names.
    """
    variable, is_absolute = os.environ.get(ROOT_VARIABLE), Path(prefix).is_absolute()
    moved, candidates = [], []
    for each in (root, Path(variable)) if variable and is_absolute else (root,):
        old, folder = divide_root(each)
        if old and Path(prefix).is_relative_to(old):
            moved.append(folder / Path(prefix).relative_to(old))
        parts = Path(prefix).parts[1:] if is_absolute and (search or each is not root) else ()
        candidates.append(folder / prefix)
        candidates += [folder.joinpath(*parts[start:]) for start in range(len(parts))]
    candidates = moved + candidates
    existing = (each for each in candidates if bin_path(each).is_file() or idx_path(each).is_file())
    return os.path.normpath(next(existing, candidates[0]))


def location(path: Path, number: int) -> str:
    """Return the start of a message about a line; `number` is 0 for the whole file."""
    return f"{path}:{number}: " if number else f"{path}: "


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; create it with `tokamake weigh`") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error}); convert it to UTF-8") from None


def _columns(text: str) -> list[str]:
    """Split a line into columns, up to a comment."""
    columns = text.split()
    starts = (number for number, column in enumerate(columns) if column.startswith("#"))
    return columns[: next(starts, None)]


def _groups(columns: list[str]) -> list[list[str]] | None:
    """Divide a line into entries of two or three columns and a part; None: another form."""
    if len(columns) == 3 or (len(columns) == 4 and _PART.fullmatch(columns[3])):
        return [columns]
    pairs = [columns[start : start + 2] for start in range(0, len(columns), 2)]
    # A single `weight prefix` may have a mistyped weight, which gets its own message. On a line of
    # several, numbers in the weight columns distinguish the form from a line with a stray column.
    has_form = len(pairs) < 2 or all(_is_number(pair[0]) for pair in pairs)
    return pairs if len(columns) % 2 == 0 and has_form else None


def _parse(number: int, group: list[str]) -> Line:
    weight = float(group[0]) if _is_number(group[0]) else math.nan
    prefix = group[1].removesuffix(".bin").removesuffix(".idx")
    corpus = group[2] if len(group) > 2 else corpus_of(prefix)
    part = parse_part(group[3]) if len(group) > 3 else None
    return Line(number, min(len(group), 3), group[0], WeightedPrefix(weight, prefix, corpus, part))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
