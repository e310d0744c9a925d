"""Tool `merge`: concatenate indexed datasets into one, or into several of limited size."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tokamake.data.indexed.merge_inputs import MergeInput, expand_prefixes
from tokamake.data.indexed.merged_dataset import open_inputs, refuse_overwrite, write_merged
from tokamake.data.indexed.paths import bin_path
from tokamake.errors import UserError

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


class _Limit(NamedTuple):
    """Maximum size of a merged dataset."""

    kind: str
    """bytes (of the .bin file), tokens or documents."""
    maximum: int
    """A single input above it is not divided."""


def merge(
    prefixes: list[Path],
    /,
    *,
    output: Path,
    corpus: str = "",
    max_bytes: str | None = None,
    max_tokens: int | None = None,
    max_documents: int | None = None,
) -> None:
    """Merge indexed datasets in the order given into one, or into several of limited size.

    Megatron's merge_datasets.py writes the same bytes. Datasets of other programs need no
    manifest: `merge` reads MMIDIDX of any Megatron, and converts TNTIDX (cached, lazy) to MMIDIDX
    and floating-point tokens to integers. It checks all indexes before it copies anything, and
    compares the files with their manifest. The manifest of the merged dataset has the size and hash
    of each input's tokens (`parts`: [bytes, sha256]); its `sha256.bin` is a digest of them.

    Args:
        prefixes: datasets to merge, without .bin or .idx, or folders: all datasets of a folder, in
            natural order of their names.
        output: prefix of the merged dataset.
        corpus: name of the corpus, for the manifest.
        max_bytes: maximum size of a merged .bin file, such as 5GB (powers of 1,000). The inputs are
            collected in order into OUTPUT-0000, OUTPUT-0001, ...; an input is never divided, even
            if it is larger.
        max_tokens: the same limit in tokens.
        max_documents: the same limit in documents.
    """
    if output.is_dir():
        raise UserError(f"--output {output}: is a folder; give a prefix, such as {output}/NAME")
    limit = _read_limit(max_bytes, max_tokens, max_documents=max_documents)
    inputs, dtype = open_inputs(expand_prefixes(prefixes))
    if limit is None:
        write_merged(inputs, output, corpus=corpus, dtype=dtype)
        return
    groups = list(_group_inputs(inputs, limit, dtype=dtype))
    outputs = _numbered_prefixes(output, len(groups))
    for prefix in outputs:  # before anything is written
        refuse_overwrite(prefix, inputs)
    for prefix, group in zip(outputs, groups, strict=True):
        write_merged(group, prefix, corpus=corpus, dtype=dtype)


def _read_limit(
    max_bytes: str | None, max_tokens: int | None, *, max_documents: int | None
) -> _Limit | None:
    limits = [
        _Limit(kind, maximum)
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
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", text.strip(), re.IGNORECASE)
    if not match:
        raise UserError(f"--max-bytes: {text!r} is not a size; give a size such as 5GB")
    return round(float(match[1]) * _UNITS[match[2].upper()])


def _group_inputs(
    inputs: list[MergeInput], limit: _Limit, *, dtype: type[np.integer]
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


def _size(dataset: MergeInput, limit: _Limit, dtype: type[np.integer]) -> int:
    sizes = {
        "bytes": dataset.tokens * np.dtype(dtype).itemsize,
        "tokens": dataset.tokens,
        "documents": dataset.documents,
    }
    return sizes[limit.kind]


def _numbered_prefixes(output: Path, count: int) -> list[Path]:
    """Return the prefixes of `count` merged datasets: PREFIX-0000, PREFIX-0001 and so on.

    Datasets with higher numbers are refused: they are left from an earlier merge, and would look
    like part of this one.
    """
    prefixes = [output.with_name(f"{output.name}-{number:04d}") for number in range(count)]
    following = output.with_name(f"{output.name}-{count:04d}")
    if bin_path(following).exists():
        raise UserError(
            f"{following}: left by an earlier merge into more datasets; remove it and later ones"
        )
    return prefixes
