"""Stage `merge`: shards, one after the other, become one pair; each is verified on the way."""

import hashlib
from pathlib import Path
from typing import IO, Any

from tokamake import __version__
from tokamake.errors import UserError

_ALIKE = (
    "tokenizer", "vocab_size", "eod", "bos", "append_eod", "prepend_bos", "split_sentences",
    "text_key", "template", "dtype",
)  # fmt: skip
_SUMS = (
    "documents_in", "documents", "empty_documents", "quarantined_documents",
    "duplicate_documents", "sequences", "tokens", "text_bytes",
)  # fmt: skip
_BLOCK = 8 << 20
_CHUNK = 1 << 20


def merge(
    prefixes: list[Path] | None = None,
    /,
    *,
    output: Path,
    corpus: str = "",
    plan: Path | None = None,
    batch: str = "",
    input: Path | None = None,
    summary: Path | None = None,
) -> None:
    """Put pairs together into one, byte for byte in the order given.

    Args:
        prefixes: pairs to merge, named without .bin or .idx, each with its manifest.
        output: prefix of the merged pair; with a plan, the folder of merged pairs.
        corpus: name of the corpus, for the manifest.
        plan: plan.json of the workflow, instead of prefixes.
        batch: name of a batch of merged pairs in the plan; those that are whole already stay.
        input: folder of the plan's shards.
        summary: JSON file to write when all merged pairs of the batch are whole.

    Raises:
        UserError: a pair is missing, differs from its manifest, or was made with another tokenizer.
    """
    if plan is None:
        _merge(prefixes or [], output, corpus)
        return
    if prefixes or input is None or summary is None:
        raise UserError("--plan: give --batch, --input and --summary with it, and no prefixes")
    from tokamake.data import batches
    from tokamake.data.planned import Merged, batch_merged, shard_prefixes

    def make(group: Merged) -> None:
        parts = shard_prefixes(group, input)
        request = _request(parts, group.corpus)
        if batches.finished([output / group.name], request):
            print(f"{output / group.name}: whole already")
        else:
            _merge(parts, output / group.name, group.corpus, request)

    groups = batch_merged(plan, batch)
    batches.make_each(groups, make)
    batches.write_batch(summary, batch, output, [output / group.name for group in groups])


def _request(prefixes: list[Path], corpus: str) -> str:
    """Digest of everything that a merged pair, manifest included, is made from."""
    from tokamake.data.pairs import read_manifest
    from tokamake.files import digest

    manifests = [read_manifest(prefix) for prefix in prefixes]
    return digest(_joined_manifest(prefixes, manifests, corpus))


def _merge(prefixes: list[Path], output: Path, corpus: str, request: str = "") -> None:
    from tokamake.data import pairs
    from tokamake.data.sources import sources_path
    from tokamake.files import atomic
    from tokamake.runtime import counted, progress

    manifests = [pairs.read_manifest(prefix) for prefix in prefixes]
    _check_alike(prefixes, manifests)
    paths = [pairs.bin_path(output), pairs.idx_path(output), sources_path(output)]
    _refuse_loss([*paths, pairs.manifest_path(output)], prefixes)
    with atomic(*paths, pairs.manifest_path(output)) as (bin_file, idx_file, map_file, manifest):
        sha256 = hashlib.sha256()
        with bin_file.open("wb") as target:
            for prefix, stated in progress(
                list(zip(prefixes, manifests, strict=True)), label="merge", unit="shard"
            ):
                _append(prefix, stated["sha256"], target, sha256)
        _join_indexes(prefixes, manifests, idx_file, map_file)
        joined = _joined_manifest(prefixes, manifests, corpus)
        hashes = pairs.hashes(bin_file, idx_file, map_file, bin_sha256=sha256.hexdigest())
        pairs.write_manifest(manifest, {"request": request, **joined, **hashes})
    tokens = sum(stated["tokens"] for stated in manifests)
    print(f"{output}: {counted(len(prefixes), 'shard')}, {counted(tokens, 'token')}")


def _refuse_loss(made: list[Path], prefixes: list[Path]) -> None:
    from tokamake.data.pairs import manifest_path

    for prefix in prefixes:
        path = manifest_path(prefix)
        if any(target.exists() and target.samefile(path) for target in made):
            raise UserError(f"{prefix}: is to be read and written; name another --output")


def _join_indexes(
    prefixes: list[Path], manifests: list[dict[str, Any]], idx_file: Path, map_file: Path
) -> None:
    """Write index and map of the pairs' sequences one after the other, a pair open at a time."""
    import numpy as np

    from tokamake.data.indexed import IndexedDataset, IndexWriter
    from tokamake.data.pairs import inputs
    from tokamake.data.sources import SourcesWriter, sources_path

    none = np.zeros(0, np.int32)
    first_input = 0
    with (
        IndexWriter(idx_file, IndexedDataset(prefixes[0]).dtype) as writer,
        SourcesWriter(map_file) as sources,
    ):
        for prefix, stated in zip(prefixes, manifests, strict=True):
            pair = IndexedDataset(prefix)
            for start in range(0, len(pair), _CHUNK):
                writer.add(pair.lengths[start : start + _CHUNK], none)
            documents = len(pair.document_bounds) - 1
            for start in range(0, documents, _CHUNK):
                writer.add(none, np.diff(pair.document_bounds[start : start + _CHUNK + 1]))
            sources.append(sources_path(prefix), documents=documents, first_input=first_input)
            first_input += len(inputs(stated))
        writer.finish()


def _joined_manifest(
    prefixes: list[Path], manifests: list[dict[str, Any]], corpus: str
) -> dict[str, Any]:
    """Sums and sources of the pairs; the merged files' own hashes are still to be added."""
    from tokamake.data.pairs import inputs

    sources = [
        {"path": str(prefix), "inputs": inputs(stated), "sha256": stated["sha256"]}
        for prefix, stated in zip(prefixes, manifests, strict=True)
    ]
    return {
        "tokamake": __version__,
        "corpus": corpus,
        "sources": sources,
        **{key: manifests[0][key] for key in _ALIKE},
        **{key: sum(stated[key] for stated in manifests) for key in _SUMS},
    }


def _check_alike(prefixes: list[Path], manifests: list[dict[str, Any]]) -> None:
    if not prefixes:
        raise UserError("merge: no pair given; name at least one prefix")
    for prefix, stated in zip(prefixes, manifests, strict=True):
        _check_files(prefix, stated)
        for key in _ALIKE:
            if stated.get(key) != manifests[0].get(key):
                raise UserError(
                    f"{prefix}: {key} is {stated.get(key)}, but {manifests[0].get(key)} in "
                    f"{prefixes[0]}; tokenize both alike"
                )


def _check_files(prefix: Path, stated: dict[str, Any]) -> None:
    """Compare sizes before anything is copied."""
    from tokamake.data.pairs import file_path

    for name in ("bin", "idx", "sources"):
        path = file_path(prefix, name)
        found = path.stat().st_size if path.is_file() else None
        if found != stated["bytes"][name]:
            what = "is missing" if found is None else f"has {found} bytes"
            raise UserError(
                f"{path}: {what}, its manifest says {stated['bytes'][name]}; remove the pair and "
                "run again"
            )


def _append(
    prefix: Path, stated: dict[str, str], target: IO[bytes], whole: "hashlib._Hash"
) -> None:
    """Copy a shard's tokens while hashing them, and compare its files with its manifest."""
    from tokamake.data.pairs import bin_path, idx_path
    from tokamake.data.sources import sources_path
    from tokamake.files import sha256

    digest = hashlib.sha256()
    with bin_path(prefix).open("rb") as source:
        while block := source.read(_BLOCK):
            digest.update(block)
            whole.update(block)
            target.write(block)
    for path, found, expected in (
        (bin_path(prefix), digest.hexdigest(), stated["bin"]),
        (idx_path(prefix), sha256(idx_path(prefix)), stated["idx"]),
        (sources_path(prefix), sha256(sources_path(prefix)), stated["sources"]),
    ):
        if found != expected:
            raise UserError(
                f"{path}: damaged, it differs from its manifest; remove it and run again"
            )
