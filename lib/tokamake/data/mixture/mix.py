"""Tool `mix`: several weighting files become one.

Entries come from `weights` and go back there; the sums are exact until they are written.
"""

import os
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from tokamake.data.corpus.splits import Part
from tokamake.errors import UserError

if TYPE_CHECKING:
    from tokamake.data.mixture.weights import Weighted


class _Drawn(NamedTuple):
    """A file of the mixture."""

    weight: Fraction
    prefix: str
    """Relative to the output's root, or absolute where a list has it so."""
    corpus: str
    part: Part | None
    source: Path
    """List that names it first."""


def mix(
    parts: list[str],
    /,
    *,
    output: Path,
    data_root: Path | None = None,
    columns: Literal[2, 3] = 3,
) -> None:
    """Combine weighting files: each gives its share of the whole, divided by its own weights.

    A prefix that stands in several lists gets the sum of its weights, and corpora of one name
    become one. Prefixes are made relative to the output's root.

    Args:
        parts: WEIGHT FILE WEIGHT FILE ...; weights are relative to each other.
        output: weighting file.
        data_root: folder that the prefixes of all files are relative to; else TOKAMAKE_DATA_ROOT
            names it, else it is the folder of each file, and that of the output.
        columns: of a line: three are `weight prefix corpus`, as tokamake, blendcorpus and Argonne's
            Megatron-DeepSpeed read it; two are `weight prefix`, which Megatron-LM takes with its
            option for data paths, started in the folder that prefixes are relative to.

    Raises:
        UserError: a weight is no number above 0, a file cannot be read, or lists disagree about the
            corpus or the part of a prefix; or a part cannot stand in two columns.
    """
    from tokamake.data.mixture.weights import Weighted, find_root, read_weights, write_weights
    from tokamake.runtime.console import counted

    lists = [(weight, path, read_weights(path)) for weight, path in _lists(parts)]
    whole = sum((weight for weight, _, _ in lists), Fraction())
    mixed: dict[str, _Drawn] = {}
    to_root = os.path.realpath(find_root(output, data_root))
    for weight, path, entries in lists:
        root = os.path.realpath(find_root(path, data_root))
        for drawn in _draw(entries, path, share=weight / whole, root=root, to_root=to_root):
            name = os.path.normpath(Path(to_root, drawn.prefix))
            mixed[name] = _add(mixed[name], drawn) if name in mixed else drawn
    entries = [Weighted(float(drawn.weight), *drawn[1:4]) for drawn in mixed.values()]
    write_weights(output, entries, columns=columns)
    print(f"{output}: {counted(len(mixed), 'file')} of {counted(len(lists), 'list')}")


def _lists(parts: list[str]) -> list[tuple[Fraction, Path]]:
    if len(parts) % 2 or not parts:
        raise UserError(f"{len(parts)} arguments; give WEIGHT FILE, one pair for each list")
    lists = []
    for text, path in zip(parts[::2], parts[1::2], strict=True):
        try:
            weight = Fraction(float(text))
        except (ValueError, OverflowError):
            weight = Fraction()
        if weight <= 0:
            raise UserError(f"{path}: weight {text!r}; give a finite number above 0 before a file")
        lists.append((weight, Path(path)))
    return lists


def _draw(
    entries: "list[Weighted]", source: Path, *, share: Fraction, root: str, to_root: str
) -> Iterator[_Drawn]:
    """Entries of a list, with their shares of the mixture and prefixes relative to `to_root`."""
    whole = sum((Fraction(entry.weight) for entry in entries), Fraction())
    for entry in entries:
        prefix = entry.prefix
        if not Path(prefix).is_absolute():
            prefix = os.path.relpath(Path(root, prefix), to_root)
        yield _Drawn(
            share * Fraction(entry.weight) / whole, prefix, entry.corpus, entry.part, source
        )


def _add(earlier: _Drawn, drawn: _Drawn) -> _Drawn:
    if earlier.corpus != drawn.corpus:
        raise UserError(
            f'{drawn.source}: {drawn.prefix} is of corpus "{drawn.corpus}", but of '
            f'"{earlier.corpus}" in {earlier.source}; name one corpus in both'
        )
    if earlier.part != drawn.part:
        raise UserError(
            f"{drawn.source}: {drawn.prefix} is meant with another part than in {earlier.source}; "
            "name one part in both"
        )
    return earlier._replace(weight=earlier.weight + drawn.weight)
