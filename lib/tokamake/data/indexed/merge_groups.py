"""Which pairs `merge` puts together: names become prefixes, and limits part them into groups."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tokamake.data.indexed.merge_inputs import MergeInput
from tokamake.data.indexed.paths import bin_path, idx_path
from tokamake.errors import UserError

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


class Limit(NamedTuple):
    """How much a merged pair may hold."""

    kind: str
    """bytes (of the token file), tokens or documents."""
    most: int
    """Upper limit; a single pair that is above it already stays whole."""


def read_limit(
    max_bytes: str | None, max_tokens: int | None, max_documents: int | None
) -> Limit | None:
    """Read the limits of the command line, of which one at most may be given.

    Raises:
        UserError: a limit is no size, or there are several.
    """
    limits = [
        Limit(kind, most)
        for kind, most in (
            ("bytes", None if max_bytes is None else read_size(max_bytes)),
            ("tokens", max_tokens),
            ("documents", max_documents),
        )
        if most is not None
    ]
    if len(limits) > 1:
        options = " and ".join(f"--max-{limit.kind}" for limit in limits)
        raise UserError(f"{options}: give one of them")
    if limits and limits[0].most < 1:
        raise UserError(f"--max-{limits[0].kind}: {limits[0].most}: give 1 or more")
    return limits[0] if limits else None


def read_size(text: str) -> int:
    """Read a number of bytes such as 5GB, in powers of 1,000.

    Raises:
        UserError: it is none.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", text.strip(), re.IGNORECASE)
    if not match:
        raise UserError(f"--max-bytes: {text!r} is no size; give one such as 5GB")
    return round(float(match[1]) * _UNITS[match[2].upper()])


def expand(names: list[Path]) -> list[Path]:
    """Prefixes that names stand for, in the order of names.

    Args:
        names: prefixes (.bin at their end is left out), or folders, which stand for all pairs in
            them in natural order: 2 before 10, whatever the order of the folder's listing.

    Raises:
        UserError: a folder has no pair, or half of one.
    """
    found: list[Path] = []
    for name in names:
        if name.is_dir() and not idx_path(name).exists():
            found += _pairs_of(name)
        elif name.suffix == ".bin" and not bin_path(name).exists():
            found.append(name.with_suffix(""))
        else:
            found.append(name)
    return found


def _pairs_of(folder: Path) -> list[Path]:
    from tokamake.data.readers import natural_key

    names = {
        path.with_suffix("")
        for path in folder.iterdir()
        if path.suffix in (".bin", ".idx") and not path.name.startswith(".")
    }
    for prefix in names:
        for path in (bin_path(prefix), idx_path(prefix)):
            if not path.is_file():
                raise UserError(f"{path}: no such file, but the other half of the pair is there")
    if not names:
        raise UserError(f"{folder}: no pair there; name another folder, or prefixes")
    return sorted(names, key=lambda prefix: natural_key(prefix.name))


def groups(
    parts: list[MergeInput], limit: Limit, dtype: type[np.integer]
) -> Iterator[list[MergeInput]]:
    """Part pairs into neighbours of at most the limit together; each group has one at least."""
    group: list[MergeInput] = []
    total = 0
    for part in parts:
        size = _size(part, limit, dtype)
        if group and total + size > limit.most:
            yield group
            group, total = [], 0
        group.append(part)
        total += size
    if group:
        yield group


def _size(part: MergeInput, limit: Limit, dtype: type[np.integer]) -> int:
    sizes = {
        "bytes": part.tokens * np.dtype(dtype).itemsize,
        "tokens": part.tokens,
        "documents": part.documents,
    }
    return sizes[limit.kind]


def numbered(output: Path, count: int) -> list[Path]:
    """Prefixes of so many merged pairs: PREFIX-0000, PREFIX-0001 and so on.

    Raises:
        UserError: pairs of higher numbers are there, which would seem to belong to these.
    """
    prefixes = [output.with_name(f"{output.name}-{number:04d}") for number in range(count)]
    following = output.with_name(f"{output.name}-{count:04d}")
    if bin_path(following).exists():
        raise UserError(
            f"{following}: left from an earlier merge into more pairs; remove it and those after it"
        )
    return prefixes
