"""Tool `lint_weights`: list all problems of a weighting file, and its mixture."""

import math
import os
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tokamake import files
from tokamake.data.corpus import splits
from tokamake.data.corpus.corpora import Corpus, read_corpora
from tokamake.data.indexed.dataset import DTYPES, HEADER, IndexedDataset, read_header
from tokamake.data.indexed.paths import bin_path, idx_path, manifest_path
from tokamake.data.mixture.shares import TOLERANCE, shares
from tokamake.data.mixture.weigh import check_options
from tokamake.data.mixture.weighting_file import (
    Line,
    Problem,
    find_prefix,
    find_root,
    location,
    scan,
)
from tokamake.errors import UserError
from tokamake.runtime.console import counted

_SUM_TOLERANCE = 1e-9


class Total(NamedTuple):
    """Sums over the datasets of one corpus, or of all corpora."""

    corpus: str
    line: int
    """First line that names the corpus."""
    files: int
    tokens: int | None
    """None: a dataset cannot be read."""
    share: float
    """Share of the training samples, 0 to 1."""


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
    """Check a weighting file of any form, and print the share of each corpus.

    Each problem is a line FILE:LINE: what; remedy. Errors end with exit status 2, warnings do not.
    If a line names no corpus, the corpus is the last path component of the prefix up to its
    number: <corpus>-<number>.

    Args:
        weights: lines of `weight prefix corpus [START:END]`, or pairs of `weight prefix`.
        data_root: folder that the prefixes are relative to; default: the environment variable
            TOKAMAKE_DATA_ROOT, else the folder of the weighting file.
        split: shares of documents for training, validation and test. Tokens and epochs then count
            training documents; without it whole datasets, or the parts that lines name.
        train_tokens: tokens that the whole training sees, to print realized epochs.
        corpora: table of corpora. It is an error if the epochs of a corpus differ by more than 1 %
            from the epochs in the table.
        temperature: temperature of corpora for which the table states nothing.
    """
    check_options(train_tokens, temperature)
    rows = read_corpora(corpora, temperature=temperature) if corpora else []
    lines, problems = scan(weights)
    problems += _form_problems(lines)
    root = find_root(weights, data_root)
    find = partial(find_prefix, root=root, search=root != weights.parent)
    tokens, read_problems = _count_tokens(lines, find, split=split)
    problems += read_problems + _weight_problems(lines, tokens)
    totals = _totals(lines, tokens)
    if corpora:
        problems += _compare_with_table(totals, rows, train_tokens=train_tokens, table=corpora)
    for problem in sorted(problems, key=lambda problem: problem.number or math.inf):
        kind = "" if problem.error else "warning: "
        print(f"{location(weights, problem.number)}{kind}{problem.text}")
    _print_table(totals, train_tokens)
    num_errors = sum(problem.error for problem in problems)
    if num_errors:
        raise UserError(f"{weights}: {counted(num_errors, 'error')}; fix the lines listed above")


def _form_problems(lines: list[Line]) -> list[Problem]:
    problems = []
    for line in lines:
        if line.columns != lines[0].columns:
            fault = f"{line.columns} columns, line {lines[0].number} has {lines[0].columns}"
            problems.append(
                Problem(line.number, f"{fault}; name the corpus in all lines or in none")
            )
        if Path(line.entry.prefix).is_absolute():
            text = f"{line.entry.prefix} is absolute; write it relative to the data root"
            problems.append(Problem(line.number, text, error=False))
    return problems


def _count_tokens(
    lines: list[Line], find: Callable[[str], str], *, split: str | None
) -> tuple[list[int | None], list[Problem]]:
    """Count the tokens that each line can draw from; None if its dataset cannot be read."""
    tokens: list[int | None] = []
    problems = []
    for line in lines:
        prefix, part = Path(find(line.entry.prefix)), line.entry.part
        try:
            if part or split:
                choose = partial(splits.training_documents, part, split)
                tokens.append(count_documents_tokens(prefix, choose))
            else:
                tokens.append(count_tokens(prefix))
        except UserError as error:
            problems.append(Problem(line.number, str(error)))
            tokens.append(None)
    return tokens, problems


def _weight_problems(lines: list[Line], tokens: list[int | None]) -> list[Problem]:
    problems = []
    for line, count in zip(lines, tokens, strict=True):
        if count == 0:
            text = f"{line.entry.prefix} has no token; remove the line"
            problems.append(Problem(line.number, text, error=False))
        elif line.entry.weight == 0 and "." in line.weight:
            text = f"weight {line.weight} is rounded to 0; write it with full precision"
            problems.append(Problem(line.number, text))
        elif line.entry.weight == 0:
            text = "weight 0 draws nothing; give a number above 0 or remove the line"
            problems.append(Problem(line.number, text))
    total = sum(map(_usable_weight, lines))
    if math.inf > total > 0 and abs(total - 1) > _SUM_TOLERANCE:
        text = f"weights sum to {total:.10g}, not 1; they are normalized, check that no line is "
        problems.append(Problem(0, f"{text}missing", error=False))
    return problems


def _usable_weight(line: Line) -> float:
    return line.entry.weight if 0 < line.entry.weight < math.inf else 0.0


def _totals(lines: list[Line], tokens: list[int | None]) -> list[Total]:
    # No usable weight at all: avoid a division by 0, for the file has an error then.
    whole = math.fsum(map(_usable_weight, lines)) or 1.0
    groups: dict[str, list[tuple[Line, int | None]]] = {}
    for line, count in zip(lines, tokens, strict=True):
        groups.setdefault(line.entry.corpus, []).append((line, count))
    return [
        Total(
            corpus,
            line=group[0][0].number,
            files=len(group),
            tokens=_sum_known([count for _, count in group]),
            share=math.fsum(_usable_weight(line) for line, _ in group) / whole,
        )
        for corpus, group in groups.items()
    ]


def _sum_known(counts: list[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _compare_with_table(
    totals: list[Total], rows: list[Corpus], *, train_tokens: int | None, table: Path
) -> list[Problem]:
    rows = [row for row in rows if row.trains]
    by_corpus = {total.corpus: total for total in totals}
    in_table = {row.corpus for row in rows}
    problems = [
        Problem(
            total.line, f'corpus "{total.corpus}" is not in {table}; add a row or correct the name'
        )
        for total in totals
        if total.corpus not in in_table
    ]
    problems += [
        Problem(0, f'corpus "{row.corpus}" of {table} has no line; add its files or remove the row')
        for row in rows
        if row.corpus not in by_corpus
    ]
    tokens = {total.corpus: total.tokens or 0 for total in totals}
    if problems or not all(tokens.values()):
        return problems  # without one corpus, the shares of all other corpora differ too
    try:
        expected = shares(rows, tokens, train_tokens=train_tokens, table=table)
    except UserError as error:
        return [Problem(0, str(error))]
    return [
        Problem(
            total.line,
            f'corpus "{corpus}": '
            f"{_difference(total, expected[corpus], train_tokens=train_tokens)} by {table}; "
            "rewrite the file with `tokamake weigh`",
        )
        for corpus, total in by_corpus.items()
        if abs(total.share / expected[corpus] - 1) > TOLERANCE
    ]


def _difference(total: Total, expected: float, *, train_tokens: int | None) -> str:
    if not train_tokens or not total.tokens:
        return f"share {total.share:.4g}, {expected:.4g} asked"
    scale = train_tokens / total.tokens
    return f"{total.share * scale:.4g} epochs realized, {expected * scale:.4g} asked"


def _print_table(totals: list[Total], train_tokens: int | None) -> None:
    whole = Total(
        "all",
        line=0,
        files=sum(total.files for total in totals),
        tokens=_sum_known([total.tokens for total in totals]),
        share=math.fsum(total.share for total in totals),
    )
    rows = [["corpus", "files", "tokens", "weight", "epochs"]]
    for total in [*totals, whole]:
        epochs = (
            total.share * train_tokens / total.tokens if train_tokens and total.tokens else None
        )
        rows.append(
            [
                total.corpus,
                f"{total.files:,}",
                "-" if total.tokens is None else f"{total.tokens:,}",
                f"{total.share:.6g}",
                "-" if epochs is None else f"{epochs:.4g}",
            ]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    for row in rows:
        numbers = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        print("  ".join([row[0].ljust(widths[0]), *numbers]))


def count_tokens(prefix: Path) -> int:
    """Return the number of tokens in a dataset."""
    missing = [str(path) for path in (bin_path(prefix), idx_path(prefix)) if not path.is_file()]
    if missing:
        raise UserError(f"no {' and no '.join(missing)}; check the prefix and --data-root")
    size = bin_path(prefix).stat().st_size
    counts = _manifest_counts(manifest_path(prefix))
    if counts is None:
        return _count_by_index(prefix, size)
    tokens, expected = counts
    if size != expected:
        raise UserError(
            f"{bin_path(prefix)}: {size} bytes, its manifest says {expected}; rebuild the dataset"
        )
    return tokens


def count_documents_tokens(prefix: Path, choose: Callable[[int], range]) -> int:
    """Return the number of tokens in the sequences that `choose` picks of all, by their number."""
    count_tokens(prefix)
    lengths = IndexedDataset(prefix).lengths
    sequences = choose(len(lengths))
    return int(lengths[sequences.start : sequences.stop].sum(dtype=np.int64))


def _manifest_counts(path: Path) -> tuple[int, int] | None:
    """Return tokens and .bin bytes that a manifest states; None if there is no manifest."""
    if not path.is_file():
        return None
    manifest = files.read_json(path, "rebuild the dataset")
    try:
        return int(manifest["tokens"]), int(manifest["bytes"]["bin"])
    except (KeyError, TypeError, ValueError):
        return None  # another program may write a .json file of this name


def _count_by_index(prefix: Path, size: int) -> int:
    code, sequences, _ = read_header(idx_path(prefix))
    if code in DTYPES and sequences:
        itemsize = np.dtype(DTYPES[code]).itemsize
        # Fast path: if the last sequence ends where the file ends, its size gives the count.
        if _last_sequence_end(idx_path(prefix), sequences, itemsize=itemsize) == size:
            return size // itemsize
    return int(IndexedDataset(prefix).lengths.sum(dtype=np.int64))


def _last_sequence_end(path: Path, sequences: int, *, itemsize: int) -> int:
    """Return the byte after the last sequence, by its pointer and length in the index."""
    pointers = HEADER.size + 4 * sequences
    with path.open("rb", buffering=0) as stream:
        (length,) = struct.unpack("<i", os.pread(stream.fileno(), 4, pointers - 4))
        last = pointers + 8 * (sequences - 1)
        (pointer,) = struct.unpack("<q", os.pread(stream.fileno(), 8, last))
    return int(pointer + length * itemsize)
