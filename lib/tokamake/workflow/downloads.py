"""Downloads of the jobs of a workflow, and files that are missing without a network."""

import sys
from collections.abc import Iterable
from pathlib import Path

from tokamake.preflight.planned import WorkflowConfig
from tokamake.remote.download import is_cached
from tokamake.remote.remote_file import RemoteFile, cache_folder, is_offline
from tokamake.runtime.console import counted
from tokamake.units import in_bytes

_MAX_SHOWN = 3
"""Addresses that a message names."""


def raw_downloads(config: WorkflowConfig) -> list[RemoteFile]:
    """Raw files behind addresses of batches that are not tokenized yet, and that have no link."""
    if not config.downloads:
        return []
    needed = {
        path
        for batch, shards in config.tokenize_batches.items()
        if not Path(config.data_set.batch_file("tokenize", batch)).exists()
        for shard in shards
        for path in config.shards[shard].files
    }
    paths = sorted(needed & config.downloads.keys())
    return [config.downloads[path].file for path in paths if not Path(path).exists()]


def report_downloads(files: Iterable[RemoteFile]) -> None:
    """Say what jobs will download; with HF_HUB_OFFLINE, name what is not in the cache."""
    missing = [file for file in files if not (is_offline() and is_cached(file))]
    if not missing:
        return
    size = in_bytes(sum(file.size for file in missing))
    text = f"tokamake: {counted(len(missing), 'file')} behind addresses, {size}, "
    if is_offline():
        num_others = len(missing) - _MAX_SHOWN
        others = f" and {num_others:,} more" if num_others > 0 else ""
        text += (
            f"not in {cache_folder()}, and HF_HUB_OFFLINE is set: "
            f"{', '.join(file.url for file in missing[:_MAX_SHOWN])}{others}; start once on a node "
            "with a network, without HF_HUB_OFFLINE"
        )
    else:
        text += f"to be downloaded to {cache_folder()}"
    print(text, file=sys.stderr)
