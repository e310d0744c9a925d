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
    """Delete the shards of merged datasets; see `delete_shards`.

    Args:
        groups: the merged datasets. All of them are complete, so that a job that fails at one of
            them tokenizes nothing again.
        shards: folder of shards.
        merged: folder of merged datasets.
    """
    for group in groups:
        if not group.dataset:
            delete_shards(shard_prefixes(group, shards), merged / group.name)


def delete_shards(shards: Iterable[Path], merged: Path) -> None:
    """Delete shards after the files of the dataset that they were merged into are read once more.

    Quarantined documents stay: they are in no merged dataset.

    Args:
        shards: prefixes of the shards.
        merged: prefix of the merged dataset, which is complete.

    Raises:
        UserError: the merged dataset is damaged; no shard is deleted.
    """
    manifest = read_manifest(merged)
    for name in manifest["bytes"]:
        if differs_from_manifest(merged, manifest, name=name):
            raise UserError(
                f"{file_path(merged, name)}: damaged, it differs from its manifest, so its shards "
                "are not deleted; remove the dataset and start the workflow again"
            )
    num_deleted = num_bytes = 0
    for shard in shards:
        paths = [path for name in _FILES if (path := file_path(shard, name)).is_file()]
        num_deleted += bool(paths)
        num_bytes += sum(path.stat().st_size for path in paths)
        for path in paths:
            path.unlink()
    if num_deleted:
        print(f"{merged}: deleted {counted(num_deleted, 'shard')}, {num_bytes / 1e9:,.2f} GB")
