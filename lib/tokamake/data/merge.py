"""Stage `merge`: shards, one after the other, become one pair; each is verified on the way."""

import hashlib
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tokamake import __version__
from tokamake.errors import UserError

if TYPE_CHECKING:
    from tokamake.data.indexed import IndexedDataset

_ALIKE = ("tokenizer", "vocab_size", "eod", "append_eod", "dtype")
_BLOCK = 8 << 20


def merge(prefixes: list[Path], /, *, output: Path, corpus: str = "") -> None:
    """Put pairs together into one, byte for byte in the order given.

    Args:
        prefixes: pairs to merge, named without .bin or .idx, each with its manifest.
        output: prefix of the merged pair.
        corpus: name of the corpus, for the manifest.

    Raises:
        UserError: a pair is missing, differs from its manifest, or was made with another tokenizer.
    """
    from tokamake.data.indexed import IndexedDataset
    from tokamake.data.pairs import (
        bin_path,
        hashes,
        idx_path,
        manifest_path,
        read_manifest,
        write_manifest,
    )
    from tokamake.files import atomic
    from tokamake.runtime import progress

    manifests = [read_manifest(prefix) for prefix in prefixes]
    _check_alike(prefixes, manifests)
    pairs = [IndexedDataset(prefix) for prefix in prefixes]
    with atomic(bin_path(output), idx_path(output), manifest_path(output)) as (
        bin_file,
        idx_file,
        manifest,
    ):
        with bin_file.open("wb") as target:
            for prefix, stated in progress(
                list(zip(prefixes, manifests, strict=True)), label="merge", unit="shard"
            ):
                _append(prefix, stated["sha256"], target)
        _join_indexes(pairs, idx_file)
        joined = _joined_manifest(prefixes, manifests, corpus)
        write_manifest(manifest, {**joined, **hashes(bin_file, idx_file)})
    print(f"{output}: {len(prefixes)} shards, {sum(m['tokens'] for m in manifests):,} tokens")


def _join_indexes(pairs: list["IndexedDataset"], idx_file: Path) -> None:
    """Write the index of the pairs' sequences one after the other."""
    import numpy as np

    from tokamake.data.indexed import write_index

    offsets = np.cumsum([0, *(len(pair) for pair in pairs)])
    bounds = [
        pair.document_bounds[1:] + offset for pair, offset in zip(pairs, offsets, strict=False)
    ]
    write_index(
        idx_file,
        dtype=pairs[0].dtype,
        lengths=np.concatenate([pair.lengths for pair in pairs]),
        document_bounds=np.concatenate([np.zeros(1, np.int64), *bounds]),
    )


def _joined_manifest(
    prefixes: list[Path], manifests: list[dict[str, Any]], corpus: str
) -> dict[str, Any]:
    """Sums and sources of the pairs; the merged files' own hashes are still to be added."""
    kept = ("inputs", "byte_range", "sha256")
    sources = [
        {"path": str(prefix), **{key: stated[key] for key in kept}}
        for prefix, stated in zip(prefixes, manifests, strict=True)
    ]
    sums = ("documents", "empty_documents", "sequences", "tokens", "text_bytes")
    return {
        "tokamake": __version__,
        "corpus": corpus,
        "sources": sources,
        **{key: manifests[0][key] for key in _ALIKE},
        **{key: sum(stated[key] for stated in manifests) for key in sums},
    }


def _check_alike(prefixes: list[Path], manifests: list[dict[str, Any]]) -> None:
    if not prefixes:
        raise UserError("merge: no pair given; name at least one prefix")
    for prefix, stated in zip(prefixes, manifests, strict=True):
        for key in _ALIKE:
            if stated.get(key) != manifests[0].get(key):
                raise UserError(
                    f"{prefix}: {key} is {stated.get(key)}, but {manifests[0].get(key)} in "
                    f"{prefixes[0]}; tokenize both alike"
                )


def _append(prefix: Path, stated: dict[str, str], target: IO[bytes]) -> None:
    """Copy a shard's tokens while hashing them, and compare with its manifest."""
    from tokamake.data.pairs import bin_path, idx_path
    from tokamake.files import sha256

    digest = hashlib.sha256()
    with bin_path(prefix).open("rb") as source:
        while block := source.read(_BLOCK):
            digest.update(block)
            target.write(block)
    for path, found, expected in (
        (bin_path(prefix), digest.hexdigest(), stated["bin"]),
        (idx_path(prefix), sha256(idx_path(prefix)), stated["idx"]),
    ):
        if found != expected:
            raise UserError(
                f"{path}: damaged, it differs from its manifest; remove it and run again"
            )
