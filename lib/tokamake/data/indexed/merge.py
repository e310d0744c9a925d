"""Stage `merge`: concatenate indexed datasets into one, or into several of limited size.

The inputs come from `tokenize`, from `merge` or from other programs. `merge` checks each of them.
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
    """Merge indexed datasets in the order given into one, or into several of limited size.

    The bytes are those that Megatron's merge_datasets.py writes. Datasets of other programs need no
    manifest: `merge` reads MMIDIDX of any Megatron, and converts TNTIDX (cached, lazy) to MMIDIDX
    and floating-point tokens to integers. It checks all indexes before it copies anything, and
    compares the files with their manifest. The manifest of the merged dataset has the size and hash
    of each input's tokens (`parts`: [bytes, sha256]); its `sha256.bin` is a digest of them.

    Args:
        prefixes: datasets to merge, without .bin or .idx, or folders: all datasets of a folder, in
            natural order of their names.
        output: prefix of the merged dataset; with a plan, the folder of merged datasets.
        corpus: name of the corpus, for the manifest.
        plan: plan.json of the workflow, instead of prefixes.
        batch: name of a job batch of the plan; datasets that are already complete are kept.
        input: folder of the plan's shards.
        summary: batch file, written when all merged datasets of the batch are complete.
        max_bytes: maximum size of a merged .bin file, such as 5GB (powers of 1,000). The inputs are
            collected in order into OUTPUT-0000, OUTPUT-0001, ...; an input is never divided, even
            if it is larger.
        max_tokens: the same limit in tokens.
        max_documents: the same limit in documents.

    Raises:
        UserError: an input is missing, is damaged, or was made with another tokenizer.
    """
    from tokamake.data.indexed.merge_groups import expand_prefixes, read_limit

    limit = read_limit(max_bytes, max_tokens, max_documents=max_documents)
    if plan is None:
        _merge_prefixes(expand_prefixes(prefixes or []), output, corpus=corpus, limit=limit)
        return
    if prefixes or limit or input is None or summary is None:
        raise UserError(
            "--plan: give --batch, --input and --summary with it, and no prefixes or limits"
        )
    _merge_batch(plan, batch, shards=input, output=output, summary=summary)


def _merge_batch(plan: Path, batch: str, *, shards: Path, output: Path, summary: Path) -> None:
    from tokamake.data.corpus.plan_file import PlannedMerge, batch_merged, shard_prefixes
    from tokamake.data.indexed import job_batch

    def make(group: PlannedMerge) -> None:
        prefixes = shard_prefixes(group, shards)
        request = _request(prefixes, group.corpus)
        if job_batch.finished([output / group.name], request):
            print(f"{output / group.name}: is already complete")
        else:
            inputs, dtype = _open_inputs(prefixes)
            _merge(inputs, output / group.name, corpus=group.corpus, dtype=dtype, request=request)

    groups = batch_merged(plan, batch)
    job_batch.make_each(groups, make)
    job_batch.write_batch(
        summary, batch, folder=output, prefixes=[output / group.name for group in groups]
    )


def _request(prefixes: list[Path], corpus: str) -> str:
    """Digest of everything that determines a merged dataset and its manifest."""
    from tokamake.data.indexed.manifest import read_manifest
    from tokamake.files import digest

    manifests = [read_manifest(prefix) for prefix in prefixes]
    return digest(_merged_manifest(prefixes, manifests, corpus=corpus))


def _merge_prefixes(
    prefixes: list[Path], output: Path, *, corpus: str, limit: "Limit | None"
) -> None:
    from tokamake.data.indexed.merge_groups import group_inputs, numbered_prefixes

    inputs, dtype = _open_inputs(prefixes)
    if limit is None:
        _merge(inputs, output, corpus=corpus, dtype=dtype)
        return
    groups = list(group_inputs(inputs, limit, dtype=dtype))
    outputs = numbered_prefixes(output, len(groups))
    for prefix in outputs:  # before anything is written
        _refuse_overwrite(prefix, inputs)
    for prefix, group in zip(outputs, groups, strict=True):
        _merge(group, prefix, corpus=corpus, dtype=dtype)


def _open_inputs(prefixes: list[Path]) -> "tuple[list[MergeInput], type[np.integer]]":
    """Open and check datasets, and choose the token type of the merged one."""
    from tokamake.data.indexed.merge_inputs import check_consistent, common_dtype, open_merge_input

    if not prefixes:
        raise UserError("no dataset given; name at least one prefix")
    inputs = [open_merge_input(prefix) for prefix in prefixes]
    check_consistent(inputs)
    return inputs, common_dtype(inputs)


def _merge(
    inputs: "list[MergeInput]",
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

    _refuse_overwrite(output, inputs)
    sources = sources_path(output)
    paths = [bin_path(output), idx_path(output), sources]
    with atomic(*paths, manifest_path(output), optional=[sources]) as temporary:
        bin_file, idx_file, sources_file, manifest = temporary
        has_sources = all(sources_path(dataset.prefix).is_file() for dataset in inputs)
        # The index and the sources are small: one thread writes them while the kernel copies.
        with ThreadPoolExecutor(1) as pool:
            jobs = [pool.submit(_merge_indexes, inputs, idx_file, dtype)]
            if has_sources:
                jobs.append(pool.submit(_merge_sources, inputs, sources_file))
            ranges = concatenate(inputs, bin_file, dtype=dtype)
            for job in jobs:
                job.result()
        merged = _merged_manifest(
            [dataset.prefix for dataset in inputs],
            _input_facts(inputs, ranges, dtype=dtype),
            corpus=corpus,
        )
        flat = [hashed for of_input in ranges for hashed in of_input]
        written = [bin_file, idx_file, *([sources_file] if has_sources else [])]
        hashes = sizes_and_hashes(*written, bin_sha256=joined_sha256(flat))
        parts = {"parts": [list(hashed) for hashed in flat]}
        write_manifest(manifest, {"request": request, **merged, **hashes, **parts})
    tokens = sum(dataset.tokens for dataset in inputs)
    print(f"{output}: {counted(len(inputs), 'dataset')}, {counted(tokens, 'token')}")


def _refuse_overwrite(output: Path, inputs: "list[MergeInput]") -> None:
    from tokamake.data.indexed.paths import bin_path

    target = bin_path(output)
    for dataset in inputs:
        if target.exists() and target.samefile(bin_path(dataset.prefix)):
            raise UserError(f"{dataset.prefix}: is both input and output; name another --output")


def _merge_indexes(inputs: "list[MergeInput]", idx_file: Path, dtype: "type[np.integer]") -> None:
    """Write the index of all inputs, about a million numbers at a time."""
    import numpy as np

    from tokamake.data.indexed.dataset import IndexWriter

    empty = np.zeros(0, np.int32)
    with IndexWriter(idx_file, dtype) as writer:
        for dataset in inputs:
            for lengths in dataset.layout.lengths.chunks():
                writer.add(lengths, empty)
            for counts in dataset.layout.sequence_counts():
                writer.add(empty, counts)
        writer.finish()


def _merge_sources(inputs: "list[MergeInput]", sources_file: Path) -> None:
    """Write the sources of all inputs; the numbers of raw files continue from input to input."""
    from tokamake.data.indexed.document_sources import SourcesWriter, sources_path
    from tokamake.data.indexed.manifest import raw_inputs

    first_input = 0
    with SourcesWriter(sources_file) as sources:
        for dataset in inputs:
            sources.append(
                sources_path(dataset.prefix), documents=dataset.documents, first_input=first_input
            )
            first_input += len(raw_inputs(dataset.manifest or {"inputs": []}))


def _input_facts(
    inputs: "list[MergeInput]", ranges: "list[list[HashedRange]]", *, dtype: "type[np.integer]"
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


def _merged_manifest(
    prefixes: list[Path], facts: list[dict[str, Any]], *, corpus: str
) -> dict[str, Any]:
    """Return the manifest of a merged dataset without sizes and hashes of its own files.

    It leaves out keys that are unknown for one of the inputs.
    """
    from tokamake import __version__
    from tokamake.data.indexed.manifest import raw_inputs
    from tokamake.data.indexed.merge_inputs import SHARED_KEYS

    sources = [
        {"path": str(prefix), "inputs": raw_inputs(known), "sha256": known["sha256"]}
        for prefix, known in zip(prefixes, facts, strict=True)
    ]

    def known_for_all(keys: tuple[str, ...]) -> list[str]:
        return [key for key in keys if all(key in known for known in facts)]

    return {
        "tokamake": __version__,
        "corpus": corpus,
        "sources": sources,
        **{key: facts[0][key] for key in known_for_all(SHARED_KEYS)},
        **{key: sum(known[key] for known in facts) for key in known_for_all(_SUMS)},
    }
