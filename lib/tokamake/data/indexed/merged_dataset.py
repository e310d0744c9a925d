"""Concatenate indexed datasets into a merged one, with its index, sources and manifest."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from tokamake import __version__
from tokamake.data.indexed.concatenate import concatenate
from tokamake.data.indexed.dataset import IndexWriter
from tokamake.data.indexed.document_sources import SourcesWriter
from tokamake.data.indexed.kernel_copy import shared_bytes
from tokamake.data.indexed.manifest import (
    HashedRange,
    joined_sha256,
    raw_inputs,
    sizes_and_hashes,
    write_manifest,
)
from tokamake.data.indexed.manifest_counts import merge_counts
from tokamake.data.indexed.merge_inputs import (
    SHARED_KEYS,
    MergeInput,
    check_consistent,
    common_dtype,
    open_merge_input,
)
from tokamake.data.indexed.paths import bin_path, idx_path, manifest_path, sources_path
from tokamake.errors import UserError
from tokamake.files import atomic
from tokamake.runtime.console import counted

_FIELDS = ("text_key", "template")
"""Keys that a merged dataset has if all inputs have the same value."""
SUMS = (
    "documents_in", "documents", "empty_documents", "quarantined_documents",
    "duplicate_documents", "sequences", "tokens", "text_bytes",
)  # fmt: skip
"""Keys of a manifest that count, and add up in a merged dataset."""


_NEAR = "near_duplicate_documents"


def open_inputs(prefixes: list[Path]) -> tuple[list[MergeInput], type[np.integer]]:
    """Open and check datasets, and choose the token type of the merged one."""
    if not prefixes:
        raise UserError("no dataset given; name at least one prefix")
    inputs = [open_merge_input(prefix) for prefix in prefixes]
    check_consistent(inputs)
    return inputs, common_dtype(inputs)


def write_merged(
    inputs: list[MergeInput],
    output: Path,
    *,
    corpus: str,
    dtype: type[np.integer],
    request: str = "",
    stated: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Write a merged dataset; the manifest also has `stated`, keys that no input states."""
    refuse_overwrite(output, inputs)
    sources = sources_path(output)
    paths = [bin_path(output), idx_path(output), sources]
    with atomic(*paths, manifest_path(output), optional=[sources]) as temporary:
        bin_file, idx_file, sources_file, manifest = temporary
        has_sources = all(sources_path(dataset.prefix).is_file() for dataset in inputs)
        # The index and the sources are small: one thread writes them while the kernel copies.
        with ThreadPoolExecutor(1) as pool:
            jobs = [pool.submit(_write_index, inputs, idx_file, dtype)]
            if has_sources:
                jobs.append(pool.submit(_write_sources, inputs, sources_file))
            ranges = concatenate(inputs, bin_file, dtype=dtype)
            for job in jobs:
                job.result()
        merged = merged_manifest(
            [dataset.prefix for dataset in inputs],
            _input_facts(inputs, ranges, dtype=dtype),
            corpus=corpus,
        )
        flat = [hashed for of_input in ranges for hashed in of_input]
        written = [bin_file, idx_file, *([sources_file] if has_sources else [])]
        hashes = sizes_and_hashes(*written, bin_sha256=joined_sha256(flat))
        parts = {"parts": [list(hashed) for hashed in flat]}
        write_manifest(manifest, {"request": request, **merged, **stated, **hashes, **parts})
    tokens = sum(dataset.tokens for dataset in inputs)
    shared = shared_bytes(bin_path(output))
    saved = f"; {shared / 1e6:,.1f} MB share the disk blocks of the inputs" * bool(shared)
    print(f"{output}: {counted(len(inputs), 'dataset')}, {counted(tokens, 'token')}{saved}")


def refuse_overwrite(output: Path, inputs: list[MergeInput]) -> None:
    """Check that a merged dataset replaces none of its inputs."""
    target = bin_path(output)
    for dataset in inputs:
        if target.exists() and target.samefile(bin_path(dataset.prefix)):
            raise UserError(f"{dataset.prefix}: is both input and output; name another --output")


def merged_manifest(
    prefixes: list[Path], facts: list[dict[str, Any]], *, corpus: str
) -> dict[str, Any]:
    """Return the manifest of a merged dataset without sizes and hashes of its own files.

    It leaves out keys that are unknown for one of the inputs, and text keys that differ.
    """
    sources = [
        {"path": str(prefix), "inputs": raw_inputs(known), "sha256": known["sha256"]}
        for prefix, known in zip(prefixes, facts, strict=True)
    ]

    def known_for_all(keys: tuple[str, ...]) -> list[str]:
        return [key for key in keys if all(key in known for known in facts)]

    same = [key for key in known_for_all(_FIELDS) if len({known[key] for known in facts}) == 1]
    return {
        "tokamake": __version__,
        "corpus": corpus,
        "sources": sources,
        **{key: facts[0][key] for key in (*known_for_all(SHARED_KEYS), *same)},
        **{key: sum(known[key] for known in facts) for key in known_for_all(SUMS)},
        **_filtered(facts),
    }


def _filtered(facts: list[dict[str, Any]]) -> dict[str, Any]:
    """Sum the counts of filters and near-duplicates. Manifests of shards without them have none."""
    near: dict[str, Any] = {}
    if any(_NEAR in known for known in facts):
        near = {_NEAR: sum(known.get(_NEAR, 0) for known in facts)}
    if not any("filters" in known for known in facts):
        return near
    return near | {
        "filtered_documents": sum(known.get("filtered_documents", 0) for known in facts),
        "filters": merge_counts(known.get("filters", ()) for known in facts),
    }


def _write_index(inputs: list[MergeInput], idx_file: Path, dtype: type[np.integer]) -> None:
    empty = np.zeros(0, np.int32)
    with IndexWriter(idx_file, dtype) as writer:
        for dataset in inputs:
            for lengths in dataset.layout.lengths.chunks():
                writer.add(lengths, empty)
            for counts in dataset.layout.sequence_counts():
                writer.add(empty, counts)
        writer.finish()


def _write_sources(inputs: list[MergeInput], sources_file: Path) -> None:
    """Write the sources of all inputs; the numbers of raw files continue from input to input."""
    first_input = 0
    with SourcesWriter(sources_file) as sources:
        for dataset in inputs:
            sources.append(
                sources_path(dataset.prefix), documents=dataset.documents, first_input=first_input
            )
            first_input += len(raw_inputs(dataset.manifest or {"inputs": []}))


def _input_facts(
    inputs: list[MergeInput], ranges: list[list[HashedRange]], *, dtype: type[np.integer]
) -> list[dict[str, Any]]:
    """Return the manifest of each input, or the same keys as far as its files tell them."""
    facts = []
    all_count_empty = all("empty_documents" in (dataset.manifest or {}) for dataset in inputs)
    for dataset, hashed in zip(inputs, ranges, strict=True):
        # Floating-point tokens were converted: the hash of the copy is not the input's.
        same_bytes = dataset.dtype.kind != "f"
        known = dataset.manifest or {
            "inputs": [],
            "sha256": {"bin": hashed[0].sha256} if same_bytes else {},
            "dtype": dtype.__name__,
            "sequences": dataset.sequences,
            "tokens": dataset.tokens,
        }
        # If one input does not tell its empty documents, count the documents of all indexes.
        facts.append(known if all_count_empty else {**known, "documents": dataset.documents})
    return facts
