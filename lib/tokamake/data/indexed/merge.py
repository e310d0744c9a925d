"""Stage `merge`: pairs, one after the other, become one, or some of about a size.

Pairs come from `tokenize`, from `merge` or from other programs; each is verified on the way.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokamake.errors import UserError

if TYPE_CHECKING:
    import numpy as np

    from tokamake.data.indexed.manifest import HashedRange
    from tokamake.data.indexed.merge_groups import Limit
    from tokamake.data.indexed.merge_inputs import MergeInput

_SUMS = (
    "documents_in", "documents", "empty_documents", "quarantined_documents",
    "duplicate_documents", "sequences", "tokens", "text_bytes",
)  # fmt: skip


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
    max_bytes: str | None = None,
    max_tokens: int | None = None,
    max_documents: int | None = None,
) -> None:
    """Put pairs together into one, or into several of about a size, in the order given.

    Bytes are those that Megatron's merge_datasets.py writes. Pairs may be those of other programs,
    without a manifest: MMIDIDX of any Megatron, or TNTIDX (cached, lazy), which becomes MMIDIDX;
    floating-point tokens become integers. Each pair is checked before anything is copied, and its
    files are compared with its manifest. The merged token file is proved by the hashes of its
    parts, in its manifest's `parts`: [bytes, sha256] of each; `sha256.bin` is a digest of them.

    Args:
        prefixes: pairs to merge, named without .bin or .idx, or folders: all pairs there, in
            natural order of their names.
        output: prefix of the merged pair; with a plan, the folder of merged pairs.
        corpus: name of the corpus, for the manifest.
        plan: plan.json of the workflow, instead of prefixes.
        batch: name of a batch of merged pairs in the plan; those that are whole already stay.
        input: folder of the plan's shards.
        summary: JSON file to write when all merged pairs of the batch are whole.
        max_bytes: size of a merged .bin file, such as 5GB (powers of 1,000); pairs are gathered
            in order into OUTPUT-0000, OUTPUT-0001, ... of at most that; a larger one stays whole.
        max_tokens: the same, counted in tokens.
        max_documents: the same, counted in documents.

    Raises:
        UserError: a pair is missing, damaged, or was made with another tokenizer than the others.
    """
    from tokamake.data.indexed.merge_groups import expand, read_limit

    limit = read_limit(max_bytes, max_tokens, max_documents)
    if plan is None:
        _merge_named(expand(prefixes or []), output, corpus, limit)
        return
    if prefixes or limit or input is None or summary is None:
        raise UserError(
            "--plan: give --batch, --input and --summary with it, and no prefixes or limits"
        )
    from tokamake.data.corpus.plan_file import PlannedMerge, batch_merged, shard_prefixes
    from tokamake.data.indexed import job_batch

    def make(group: PlannedMerge) -> None:
        parts = shard_prefixes(group, input)
        request = _request(parts, group.corpus)
        if job_batch.finished([output / group.name], request):
            print(f"{output / group.name}: whole already")
        else:
            opened, dtype = _open(parts)
            _merge(opened, output / group.name, corpus=group.corpus, dtype=dtype, request=request)

    groups = batch_merged(plan, batch)
    job_batch.make_each(groups, make)
    job_batch.write_batch(summary, batch, output, [output / group.name for group in groups])


def _request(prefixes: list[Path], corpus: str) -> str:
    """Digest of everything that a merged pair, manifest included, is made from."""
    from tokamake.data.indexed.manifest import read_manifest
    from tokamake.files import digest

    manifests = [read_manifest(prefix) for prefix in prefixes]
    return digest(_joined_manifest(prefixes, manifests, corpus))


def _merge_named(
    prefixes: list[Path], output: Path, corpus: str, limit: "Limit | None" = None
) -> None:
    from tokamake.data.indexed import merge_groups

    parts, dtype = _open(prefixes)
    if limit is None:
        _merge(parts, output, corpus=corpus, dtype=dtype)
        return
    groups = list(merge_groups.groups(parts, limit, dtype))
    outputs = merge_groups.numbered(output, len(groups))
    for prefix in outputs:
        _refuse_loss(prefix, parts)
    for prefix, group in zip(outputs, groups, strict=True):
        _merge(group, prefix, corpus=corpus, dtype=dtype)


def _open(prefixes: list[Path]) -> "tuple[list[MergeInput], type[np.integer]]":
    """Open and check pairs, and find the token type that they have in common."""
    from tokamake.data.indexed.merge_inputs import check_alike, common_dtype, open_part

    if not prefixes:
        raise UserError("no pair given; name at least one prefix")
    parts = [open_part(prefix) for prefix in prefixes]
    check_alike(parts)
    return parts, common_dtype(parts)


def _merge(
    parts: "list[MergeInput]",
    output: Path,
    *,
    corpus: str,
    dtype: "type[np.integer]",
    request: str = "",
) -> None:
    from concurrent.futures import ThreadPoolExecutor

    from tokamake.data.indexed.concatenate import concatenate
    from tokamake.data.indexed.document_sources import sources_path
    from tokamake.data.indexed.manifest import joined_sha256, sizes_and_hashes, write_manifest
    from tokamake.data.indexed.paths import bin_path, idx_path, manifest_path
    from tokamake.files import atomic
    from tokamake.runtime.console import counted

    _refuse_loss(output, parts)
    sources = sources_path(output)
    paths = [bin_path(output), idx_path(output), sources]
    with atomic(*paths, manifest_path(output), optional=[sources]) as temporary:
        bin_file, idx_file, map_file, manifest = temporary
        mapped = all(sources_path(part.prefix).is_file() for part in parts)
        # The index and the map are small; they are made while the kernel copies the tokens.
        with ThreadPoolExecutor(1) as beside:
            joined_index = beside.submit(_join_indexes, parts, idx_file, dtype)
            joined_map = beside.submit(_join_sources, parts, map_file) if mapped else None
            pieces = concatenate(parts, bin_file, dtype)
            joined_index.result()
            if joined_map:
                joined_map.result()
        facts = _facts(parts, pieces, dtype)
        joined = _joined_manifest([part.prefix for part in parts], facts, corpus)
        flat = [piece for of_part in pieces for piece in of_part]
        made = [bin_file, idx_file, *([map_file] if mapped else [])]
        hashes = sizes_and_hashes(*made, bin_sha256=joined_sha256(flat))
        proof = {"parts": [list(piece) for piece in flat]}
        write_manifest(manifest, {"request": request, **joined, **hashes, **proof})
    tokens = sum(part.tokens for part in parts)
    print(f"{output}: {counted(len(parts), 'pair')}, {counted(tokens, 'token')}")


def _refuse_loss(output: Path, parts: "list[MergeInput]") -> None:
    from tokamake.data.indexed.paths import bin_path

    made = bin_path(output)
    for part in parts:
        if made.exists() and made.samefile(bin_path(part.prefix)):
            raise UserError(f"{part.prefix}: is to be read and written; name another --output")


def _join_indexes(parts: "list[MergeInput]", idx_file: Path, dtype: "type[np.integer]") -> None:
    """Write the index of the pairs' sequences one after the other, a million numbers at a time."""
    import numpy as np

    from tokamake.data.indexed.dataset import IndexWriter

    none = np.zeros(0, np.int32)
    with IndexWriter(idx_file, dtype) as writer:
        for part in parts:
            for lengths in part.layout.lengths.chunks():
                writer.add(lengths, none)
            last = np.zeros(0, np.int64)
            for bounds in part.layout.bounds.chunks():
                writer.add(none, np.diff(bounds, prepend=last))
                last = bounds[-1:]
        writer.finish()


def _join_sources(parts: "list[MergeInput]", map_file: Path) -> None:
    """Write the map of the pairs' raw files, which count on from pair to pair."""
    from tokamake.data.indexed.document_sources import SourcesWriter, sources_path
    from tokamake.data.indexed.manifest import raw_inputs

    first_input = 0
    with SourcesWriter(map_file) as sources:
        for part in parts:
            sources.append(
                sources_path(part.prefix), documents=part.documents, first_input=first_input
            )
            first_input += len(raw_inputs(part.stated or {"inputs": []}))


def _facts(
    parts: "list[MergeInput]", pieces: "list[list[HashedRange]]", dtype: "type[np.integer]"
) -> list[dict[str, Any]]:
    """What is known of each pair: its manifest, or what its files alone tell."""
    facts = []
    complete = all("empty_documents" in (part.stated or {}) for part in parts)
    for part, copied in zip(parts, pieces, strict=True):
        same_bytes = part.dtype.kind != "f"
        known = part.stated or {
            "inputs": [],
            "sha256": {"bin": copied[0].sha256} if same_bytes else {},
            "dtype": dtype.__name__,
            "sequences": part.sequences,
            "tokens": part.tokens,
        }
        # Where it is not known how many documents are empty, all in the index count.
        facts.append(known if complete else {**known, "documents": part.documents})
    return facts


def _joined_manifest(
    prefixes: list[Path], known: list[dict[str, Any]], corpus: str
) -> dict[str, Any]:
    """Sums and sources of the pairs; the merged files' own hashes are still to be added.

    What is not known of all pairs is left out.
    """
    from tokamake import __version__
    from tokamake.data.indexed.manifest import raw_inputs
    from tokamake.data.indexed.merge_inputs import ALIKE

    sources = [
        {"path": str(prefix), "inputs": raw_inputs(stated), "sha256": stated["sha256"]}
        for prefix, stated in zip(prefixes, known, strict=True)
    ]

    def of_all(keys: tuple[str, ...]) -> list[str]:
        return [key for key in keys if all(key in stated for stated in known)]

    return {
        "tokamake": __version__,
        "corpus": corpus,
        "sources": sources,
        **{key: known[0][key] for key in of_all(ALIKE)},
        **{key: sum(stated[key] for stated in known) for key in of_all(_SUMS)},
    }
