"""Shards that are deleted on purpose, because a merged dataset holds the same tokens."""

from collections.abc import Iterable
from pathlib import Path

from tokamake.data.corpus.plan_file import PlannedMerge, shard_prefixes
from tokamake.data.indexed.manifest import differs_from_manifest, read_manifest
from tokamake.data.indexed.paths import file_path
from tokamake.errors import UserError
from tokamake.runtime.console import counted

_FILES = ("json", "bin", "idx", "sources")
"""The manifest comes first: without it, no dataset counts as complete."""


def delete_merged_shards(groups: Iterable[PlannedMerge], shards: Path, *, merged: Path) -> None:
    """Delete the shards of merged datasets, after all files of the datasets are read once more.

    If a merged dataset is damaged, no shard is deleted. Quarantined documents stay: they are in no
    merged dataset.
    """
    merged_here = [group for group in groups if not group.dataset]
    for group in merged_here:
        _verify(merged / group.name)
    for group in merged_here:
        _delete(shard_prefixes(group, shards), merged / group.name)


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
