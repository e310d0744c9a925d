"""Which datasets `merge` puts together: folders become prefixes, limits divide them into groups."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tokamake.data.indexed.merge_inputs import MergeInput
from tokamake.data.indexed.paths import bin_path, idx_path
from tokamake.data.readers import natural_key
from tokamake.errors import UserError

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


class Limit(NamedTuple):
    """Maximum size of a merged dataset."""

    kind: str
    """bytes (of the .bin file), tokens or documents."""
    maximum: int
    """A single input above it is not divided."""


def read_limit(
    max_bytes: str | None, max_tokens: int | None, *, max_documents: int | None
) -> Limit | None:
    """Read the limit of the command line; at most one may be given."""
    limits = [
        Limit(kind, maximum)
        for kind, maximum in (
            ("bytes", None if max_bytes is None else _read_size(max_bytes)),
            ("tokens", max_tokens),
            ("documents", max_documents),
        )
        if maximum is not None
    ]
    if len(limits) > 1:
        options = " and ".join(f"--max-{limit.kind}" for limit in limits)
        raise UserError(f"{options}: give one of them")
    if limits and limits[0].maximum < 1:
        raise UserError(f"--max-{limits[0].kind}: {limits[0].maximum}: give 1 or more")
    return limits[0] if limits else None


def _read_size(text: str) -> int:
    """Read a number of bytes such as 5GB, in powers of 1,000."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", text.strip(), re.IGNORECASE)
    if not match:
        raise UserError(f"--max-bytes: {text!r} is not a size; give a size such as 5GB")
    return round(float(match[1]) * _UNITS[match[2].upper()])


def expand_prefixes(names: list[Path]) -> list[Path]:
    """Return the prefixes that names stand for, in the order of the names.

    A name is a prefix, also with .bin or .idx at the end, or a folder: all its datasets in natural
    order, 2 before 10.
    """
    prefixes: list[Path] = []
    for name in names:
        if name.is_dir() and not idx_path(name).exists():
            prefixes += _datasets_in(name)
        elif name.suffix in (".bin", ".idx") and not bin_path(name).exists():
            prefixes.append(name.with_suffix(""))
        else:
            prefixes.append(name)
    return prefixes


def _datasets_in(folder: Path) -> list[Path]:
    prefixes = {
        path.with_suffix("")
        for path in folder.iterdir()
        # Names with a leading dot are temporary files of a running job.
        if path.suffix in (".bin", ".idx") and not path.name.startswith(".")
    }
    for prefix in prefixes:
        for path in (bin_path(prefix), idx_path(prefix)):
            if not path.is_file():
                raise UserError(
                    f"{path}: no such file, but the other file of the dataset exists; rebuild or "
                    "remove the dataset"
                )
    if not prefixes:
        raise UserError(f"{folder}: no dataset in this folder; name another folder, or prefixes")
    return sorted(prefixes, key=lambda prefix: natural_key(prefix.name))


def group_inputs(
    inputs: list[MergeInput], limit: Limit, *, dtype: type[np.integer]
) -> Iterator[list[MergeInput]]:
    """Divide inputs into groups of neighbours within the limit; a group has at least one."""
    group: list[MergeInput] = []
    total = 0
    for dataset in inputs:
        size = _size(dataset, limit, dtype)
        if group and total + size > limit.maximum:
            yield group
            group, total = [], 0
        group.append(dataset)
        total += size
    if group:
        yield group


def _size(dataset: MergeInput, limit: Limit, dtype: type[np.integer]) -> int:
    sizes = {
        "bytes": dataset.tokens * np.dtype(dtype).itemsize,
        "tokens": dataset.tokens,
        "documents": dataset.documents,
    }
    return sizes[limit.kind]


def numbered_prefixes(output: Path, count: int) -> list[Path]:
    """Return the prefixes of `count` merged datasets: PREFIX-0000, PREFIX-0001 and so on.

    Datasets with higher numbers are refused: they are left from an earlier merge, and would look
    like part of this one.
    """
    prefixes = [output.with_name(f"{output.name}-{number:04d}") for number in range(count)]
    following = output.with_name(f"{output.name}-{count:04d}")
    if bin_path(following).exists():
        raise UserError(
            f"{following}: left by an earlier merge into more datasets; remove it and those after "
            "it"
        )
    return prefixes
