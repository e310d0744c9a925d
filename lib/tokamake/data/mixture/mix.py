"""Tool `mix`: combine several weighting files into one.

The sums of weights are exact fractions; they are rounded once, when the file is written.
"""

import os
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Literal, NamedTuple

from tokamake.data.corpus.splits import FractionRange
from tokamake.data.mixture.weighting_file import (
    WeightedPrefix,
    divide_root,
    find_prefix,
    find_root,
    read_weighting_file,
    write_weighting_file,
)
from tokamake.errors import UserError
from tokamake.runtime.console import counted


class _MixedEntry(NamedTuple):
    """A dataset of the combined mixture."""

    weight: Fraction
    prefix: str
    """Relative to the root of the output; absolute if the weighting file has it so."""
    corpus: str
    part: FractionRange | None
    source: Path
    """First weighting file that names the dataset."""


def mix(
    parts: list[str], /, *, output: Path, data_root: Path | None = None, columns: Literal[2, 3] = 3
) -> None:
    """Combine weighting files into one, each with a share of the whole.

    The weights within a file divide its share. If several files name a prefix, its weights are
    added. Corpora of the same name become one. Prefixes become relative to the root of the output.

    Args:
        parts: WEIGHT FILE WEIGHT FILE ...; the weights are relative to each other.
        output: weighting file to write.
        data_root: folder that the prefixes of all files are relative to; default: the environment
            variable TOKAMAKE_DATA_ROOT, else the folder of each file, and the output's folder.
        columns: columns of a line. Three are `weight prefix corpus`, which tokamake, blendcorpus
            and Argonne's Megatron-DeepSpeed read. Two are `weight prefix`, which Megatron-LM takes
            as its data paths, if you start it in the folder that the prefixes are relative to.
    """
    files = [(weight, path, read_weighting_file(path)) for weight, path in _parse_files(parts)]
    total = sum((weight for weight, _, _ in files), Fraction())
    mixed: dict[str, _MixedEntry] = {}
    output_root = os.path.realpath(divide_root(find_root(output, data_root))[1])
    for weight, path, entries in files:
        root = find_root(path, data_root)
        for entry in _scale(entries, path, share=weight / total, root=root, to_root=output_root):
            name = os.path.normpath(Path(output_root, entry.prefix))
            mixed[name] = _add(mixed[name], entry) if name in mixed else entry
    lines = [WeightedPrefix(float(entry.weight), *entry[1:4]) for entry in mixed.values()]
    write_weighting_file(output, lines, columns=columns)
    print(f"{output}: {counted(len(mixed), 'dataset')} of {counted(len(files), 'weighting file')}")


def _parse_files(parts: list[str]) -> list[tuple[Fraction, Path]]:
    if len(parts) % 2 or not parts:
        raise UserError(f"{len(parts)} arguments; give WEIGHT FILE for each weighting file")
    files = []
    for text, path in zip(parts[::2], parts[1::2], strict=True):
        try:
            weight = Fraction(float(text))
        except (ValueError, OverflowError):
            weight = Fraction()
        if weight <= 0:
            raise UserError(f"{path}: weight {text!r}; give a finite number above 0 before a file")
        files.append((weight, Path(path)))
    return files


def _scale(
    entries: list[WeightedPrefix], source: Path, *, share: Fraction, root: Path, to_root: str
) -> Iterator[_MixedEntry]:
    total = sum((Fraction(entry.weight) for entry in entries), Fraction())
    own_root = os.path.realpath(divide_root(root)[1])
    for entry in entries:
        prefix = find_prefix(entry.prefix, root, search=root != source.parent)
        if not Path(entry.prefix).is_absolute():
            prefix = os.path.relpath(Path(own_root, entry.prefix), to_root)
        weight = share * Fraction(entry.weight) / total
        yield _MixedEntry(weight, prefix, entry.corpus, entry.part, source)


def _add(earlier: _MixedEntry, entry: _MixedEntry) -> _MixedEntry:
    if earlier.corpus != entry.corpus:
        raise UserError(
            f'{entry.source}: {entry.prefix} is of corpus "{entry.corpus}", but of '
            f'"{earlier.corpus}" in {earlier.source}; name one corpus in both'
        )
    if earlier.part != entry.part:
        raise UserError(
            f"{entry.source}: {entry.prefix} has another part than in {earlier.source}; name one "
            "part in both"
        )
    return earlier._replace(weight=earlier.weight + entry.weight)
