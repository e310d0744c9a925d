"""Stage `merge-batch`: the merged datasets of a job batch, from shards or existing datasets."""

import os
from collections.abc import Iterable
from pathlib import Path

from tokamake.data.corpus import plan_file
from tokamake.data.indexed import job_batch
from tokamake.data.indexed.linked_dataset import remove_links, write_linked
from tokamake.data.indexed.manifest import differs_from_manifest, read_manifest
from tokamake.data.indexed.merged_dataset import merged_manifest, open_inputs, write_merged
from tokamake.data.indexed.paths import file_path
from tokamake.data.tokenizers import open_tokenizer
from tokamake.errors import UserError
from tokamake.files import digest, sync_file_system
from tokamake.runtime.console import counted
from tokamake.runtime.folder_lock import alone

_FILES = ("json", "bin", "idx", "sources")
"""The manifest comes first: without it, no dataset counts as complete."""
_MAX_THREADS = 8
"""Existing datasets that are verified at a time: their indexes are in memory."""


def merge_batch(
    *,
    plan: Path,
    batch: str,
    input: Path,
    output: Path,
    summary: Path,
    tokenizer: Path | None = None,
    append_eod: bool = True,
) -> None:
    """Make the merged datasets of a job batch; complete ones are kept.

    Shards are merged. If the plan says so, they are deleted after the merged dataset is verified.
    A dataset of a corpus with the format indexed, which exists already, is checked: its index, its
    tokens against the vocabulary, and the end of each document. The merged dataset then links to
    its files. Only an index in TNTIDX and floating-point tokens are converted to new files.

    Args:
        plan: plan.json of the workflow.
        batch: name of a batch of merged datasets in the plan.
        input: folder of shards.
        output: folder of merged datasets.
        summary: batch file, written when all merged datasets of the batch are complete.
        tokenizer: tokenizer of existing datasets.
        append_eod: whether documents of existing datasets end with the end-of-document token.
    """
    opened = None if tokenizer is None else open_tokenizer(tokenizer)

    def make_linked(group: plan_file.PlannedMerge) -> None:
        if opened is None:
            raise UserError(f"--tokenizer: missing; {group.corpus} has existing datasets")
        request = digest([*group, opened.fingerprint, append_eod])
        if job_batch.finished([output / group.name], request):
            print(f"{output / group.name}: is already complete\n", end="")
            return
        write_linked(
            Path(group.dataset),
            output / group.name,
            corpus=group.corpus,
            tokenizer=opened,
            has_eod=append_eod,
            request=request,
        )

    def make_merged(group: plan_file.PlannedMerge) -> None:
        prefixes = plan_file.shard_prefixes(group, input)
        # Everything that determines a merged dataset is in its manifest.
        manifests = [read_manifest(prefix) for prefix in prefixes]
        request = digest(merged_manifest(prefixes, manifests, corpus=group.corpus))
        if job_batch.finished([output / group.name], request):
            print(f"{output / group.name}: is already complete")
        else:
            # The corpus may have had existing datasets before: never write into them.
            remove_links(output / group.name)
            inputs, dtype = open_inputs(prefixes)
            write_merged(
                inputs, output / group.name, corpus=group.corpus, dtype=dtype, request=request
            )

    groups = plan_file.batch_merged(plan, batch)
    with alone(summary):
        if linked := [group for group in groups if group.dataset]:
            # One thread waits for the disk while other threads read and hash. Each holds an index.
            threads = min(len(os.sched_getaffinity(0)) + 1, len(linked), _MAX_THREADS)
            job_batch.make_each(linked, make_linked, threads=threads)
            sync_file_system(output)
        job_batch.make_each([group for group in groups if not group.dataset], make_merged)
        keep_shards = plan_file.read_plan(plan).keep_shards
        if not keep_shards:
            delete_merged_shards(groups, input, merged=output)
        prefixes = [output / group.name for group in groups]
        job_batch.write_batch(
            summary, batch, folder=output, prefixes=prefixes, keep_inputs=keep_shards
        )


def delete_merged_shards(
    groups: Iterable[plan_file.PlannedMerge], shards: Path, *, merged: Path
) -> None:
    """Delete the shards of merged datasets, after all files of the datasets are read again.

    If a merged dataset is damaged, no shard is deleted. Quarantined documents stay: they are in no
    merged dataset.
    """
    merged_here = [group for group in groups if not group.dataset]
    for group in merged_here:
        _verify(merged / group.name)
    for group in merged_here:
        _delete(plan_file.shard_prefixes(group, shards), merged / group.name)


def _verify(merged: Path) -> None:
    manifest = read_manifest(merged)
    for name in manifest["bytes"]:
        if differs_from_manifest(merged, manifest, name=name):
            raise UserError(
                f"{file_path(merged, name)}: damaged, it differs from its manifest, so its shards "
                "are not deleted; remove the dataset and start the workflow again"
            )


def _delete(shards: Iterable[Path], merged: Path) -> None:
    num_deleted = num_bytes = 0
    for shard in shards:
        paths = [path for name in _FILES if (path := file_path(shard, name)).is_file()]
        num_deleted += bool(paths)
        num_bytes += sum(path.stat().st_size for path in paths)
        for path in paths:
            path.unlink()
    if num_deleted:
        print(f"{merged}: deleted {counted(num_deleted, 'shard')}, {num_bytes / 1e6:,.1f} MB")
