"""Tool `lint_weights`: all that is wrong with a weighting file at once, and what it draws.

Reads the file, the pairs it names and, where one is given, the table of corpora.
"""

import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tokamake.data.corpus import splits
from tokamake.data.mixture.weights import Line, Problem, find_root, place, scan
from tokamake.errors import UserError

if TYPE_CHECKING:
    from tokamake.data.corpus.corpora import Corpus

_SUM_TOLERANCE = 1e-9


class Total(NamedTuple):
    """What a corpus, or all of them, is made of."""

    corpus: str
    line: int
    """Line of the file that names it first."""
    files: int
    tokens: int | None
    """None: a pair of it cannot be read."""
    share: float
    """Of the training samples, 0 to 1."""


def lint_weights(
    weights: Path,
    /,
    *,
    data_root: Path | None = None,
    split: str | None = None,
    train_tokens: int | None = None,
    corpora: Path | None = None,
    temperature: float | None = None,
) -> None:
    """Check a weighting file of any form, and print what it draws from each corpus.

    Each problem is a line FILE:LINE: what; remedy. Errors end with exit status 2, warnings do not.
    Where a line names no corpus, it is the prefix's last part up to its first hyphen.

    Args:
        weights: lines of `weight prefix corpus [START:END]`, or pairs of `weight prefix`.
        data_root: folder that the prefixes are relative to; else TOKAMAKE_DATA_ROOT names it, else
            it is the folder of the weighting file.
        split: shares of documents for training, validation and test: tokens and epochs are of what
            trains; without it of whole files, or of the parts that lines name.
        train_tokens: tokens that the whole training sees, for the epochs realized.
        corpora: table of corpora; a corpus whose epochs differ by more than 1 % from those that
            come of it is an error.
        temperature: temperature of the table's corpora that state nothing.

    Raises:
        UserError: there is an error in the file, or it cannot be read.
    """
    from tokamake.data.corpus.corpora import read_corpora
    from tokamake.data.mixture.weigh import check_options
    from tokamake.runtime.console import counted

    check_options(train_tokens, temperature)
    rows = read_corpora(corpora, temperature=temperature) if corpora else []
    lines, problems = scan(weights)
    problems += _columns(lines)
    tokens, faults = _tokens(lines, find_root(weights, data_root), split)
    problems += faults + _weights(lines, tokens)
    totals = _totals(lines, tokens)
    if corpora:
        problems += _compare(totals, rows, train_tokens, corpora)
    for problem in sorted(problems, key=lambda problem: problem.number or math.inf):
        kind = "" if problem.error else "warning: "
        print(f"{place(weights, problem.number)}{kind}{problem.text}")
    _print_table(totals, train_tokens)
    errors = sum(problem.error for problem in problems)
    if errors:
        raise UserError(f"{weights}: {counted(errors, 'error')}; mend what is listed")


def _columns(lines: list[Line]) -> list[Problem]:
    """Lines of another form than the first, and paths that hold on one machine only."""
    problems = []
    for line in lines:
        if line.columns != lines[0].columns:
            what = f"{line.columns} columns, line {lines[0].number} has {lines[0].columns}"
            problems.append(
                Problem(line.number, f"{what}; name the corpus in all lines or in none")
            )
        if Path(line.entry.prefix).is_absolute():
            what = f"{line.entry.prefix} is absolute; write it relative to the data root"
            problems.append(Problem(line.number, what, error=False))
    return problems


def _tokens(
    lines: list[Line], root: Path, split: str | None
) -> tuple[list[int | None], list[Problem]]:
    """Tokens of every line's part of its pair, None where the pair cannot be read."""
    from tokamake.data.indexed.token_counts import count_documents_tokens, count_tokens

    tokens: list[int | None] = []
    faults = []
    for line in lines:
        try:
            prefix, part = root / line.entry.prefix, line.entry.part
            chosen = partial(splits.training_documents, part, split) if part or split else None
            tokens.append(
                count_documents_tokens(prefix, chosen) if chosen else count_tokens(prefix)
            )
        except UserError as error:
            faults.append(Problem(line.number, str(error)))
            tokens.append(None)
    return tokens, faults


def _weights(lines: list[Line], tokens: list[int | None]) -> list[Problem]:
    """Weights of 0, files of no use, and a sum that is not 1."""
    problems = []
    for line, count in zip(lines, tokens, strict=True):
        if count == 0:
            what = f"{line.entry.prefix} holds no token; remove the line"
            problems.append(Problem(line.number, what, error=False))
        elif line.entry.weight == 0 and "." in line.weight:
            what = f"weight {line.weight} is rounded to 0; write it with full precision"
            problems.append(Problem(line.number, what))
        elif line.entry.weight == 0:
            what = "weight 0 draws nothing; give a number above 0 or remove the line"
            problems.append(Problem(line.number, what))
    total = sum(map(_usable, lines))
    if math.inf > total > 0 and abs(total - 1) > _SUM_TOLERANCE:
        what = f"weights sum to {total:.10g}, not 1; they are normalized, see that no line is lost"
        problems.append(Problem(0, what, error=False))
    return problems


def _usable(line: Line) -> float:
    """Weight of a line, or 0 where it is none."""
    return line.entry.weight if 0 < line.entry.weight < math.inf else 0.0


def _totals(lines: list[Line], tokens: list[int | None]) -> list[Total]:
    """Corpora in the order in which the file names them."""
    whole = math.fsum(map(_usable, lines)) or 1.0
    named: dict[str, list[tuple[Line, int | None]]] = {}
    for line, count in zip(lines, tokens, strict=True):
        named.setdefault(line.entry.corpus, []).append((line, count))
    return [
        Total(
            corpus,
            line=group[0][0].number,
            files=len(group),
            tokens=_sum([count for _, count in group]),
            share=math.fsum(_usable(line) for line, _ in group) / whole,
        )
        for corpus, group in named.items()
    ]


def _sum(counts: list[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _compare(
    totals: list[Total], rows: "list[Corpus]", train_tokens: int | None, table: Path
) -> list[Problem]:
    """What the file draws against what the table asks for."""
    from tokamake.data.mixture.shares import TOLERANCE, shares

    rows = [row for row in rows if row.trains]
    found = {total.corpus: total for total in totals}
    known = {row.corpus for row in rows}
    problems = [
        Problem(
            total.line,
            f'corpus "{total.corpus}" is not in {table}; add a row or mend its name',
        )
        for total in totals
        if total.corpus not in known
    ]
    problems += [
        Problem(0, f'corpus "{row.corpus}" of {table} has no line; add its files or remove the row')
        for row in rows
        if row.corpus not in found
    ]
    tokens = {total.corpus: total.tokens or 0 for total in totals}
    if problems or not all(tokens.values()):
        return problems  # shares would all be others
    try:
        asked = shares(rows, tokens, train_tokens=train_tokens, table=table)
    except UserError as error:
        return [Problem(0, str(error))]
    for corpus, total in found.items():
        if abs(total.share / asked[corpus] - 1) > TOLERANCE:
            what = _difference(total, asked[corpus], train_tokens)
            text = (
                f'corpus "{corpus}": {what} by {table}; make the file again with `tokamake weigh`'
            )
            problems.append(Problem(total.line, text))
    return problems


def _difference(total: Total, asked: float, train_tokens: int | None) -> str:
    if not train_tokens or not total.tokens:
        return f"share {total.share:.4g}, {asked:.4g} asked"
    scale = train_tokens / total.tokens
    return f"{total.share * scale:.4g} epochs realized, {asked * scale:.4g} asked"


def _print_table(totals: list[Total], train_tokens: int | None) -> None:
    """Print corpora and their sum, numbers flush right."""
    whole = Total(
        "all",
        line=0,
        files=sum(total.files for total in totals),
        tokens=_sum([total.tokens for total in totals]),
        share=math.fsum(total.share for total in totals),
    )
    cells = [["corpus", "files", "tokens", "weight", "epochs"]]
    for total in [*totals, whole]:
        epochs = (
            total.share * train_tokens / total.tokens if train_tokens and total.tokens else None
        )
        cells.append(
            [
                total.corpus,
                f"{total.files:,}",
                "-" if total.tokens is None else f"{total.tokens:,}",
                f"{total.share:.6g}",
                "-" if epochs is None else f"{epochs:.4g}",
            ]
        )
    widths = [max(len(row[column]) for row in cells) for column in range(5)]
    for row in cells:
        numbers = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        print("  ".join([row[0].ljust(widths[0]), *numbers]))
