"""Tool `verify`: compare raw files with the hashes in the manifests of the datasets made from them.

`describe` checks the datasets themselves.
"""

import os
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tokamake.data.indexed.manifest import raw_inputs, read_manifest, sha256_of
from tokamake.data.indexed.merge_inputs import expand_prefixes, size_faults
from tokamake.data.readers import reading
from tokamake.data.readers._page_cuts import next_page
from tokamake.data.readers.jsonl import next_line
from tokamake.errors import UserError
from tokamake.files import digest
from tokamake.runtime.console import counted, progress


def verify(prefixes: list[Path], /) -> None:
    """Check that the raw files of datasets still have the content that was tokenized.

    It reads the raw files again, or the byte ranges that were tokenized, and compares their hashes
    with the manifests. Raw files have the paths that `tokenize` was given: relative ones start at
    the working directory, so run it in the same folder as the workflow. Of the datasets themselves,
    it compares only the sizes; `describe` checks their contents.

    Args:
        prefixes: shards or merged datasets, without .bin or .idx, or folders: all datasets of a
            folder.
    """
    named = expand_prefixes(prefixes)
    if not named:
        raise UserError("no dataset given; name at least one prefix")
    manifests = {prefix: read_manifest(prefix) for prefix in named}
    faults = [
        fault
        for prefix, manifest in manifests.items()
        for fault in size_faults(prefix, manifest, names=manifest["bytes"])
    ]
    # A shard and the merged dataset that contains it state the same raw files.
    inputs = {digest(raw): raw for manifest in manifests.values() for raw in raw_inputs(manifest)}
    if faults := [*faults, *filter(None, find_faults(inputs.values()))]:
        raise UserError("\n".join(faults))
    paths = {raw["path"] for raw in inputs.values()}
    num_bytes = sum(raw["bytes"] for raw in inputs.values())
    print(f"{counted(len(paths), 'raw file')}, {num_bytes / 1e6:,.1f} MB: unchanged")


def find_faults(inputs: Collection[dict[str, Any]]) -> list[str | None]:
    """Return for each entry of a manifest how its raw file differs, or None."""
    # Threads suffice: hashing releases the interpreter lock.
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        faults = pool.map(_fault, inputs)
        return list(progress(faults, label="verify", total=len(inputs), unit="raw files"))


def _fault(raw: dict[str, Any]) -> str | None:
    path = Path(raw["path"])
    start, end = raw["byte_range"] or (0, None)
    try:
        if raw["unit"] == "line":  # the first line that begins in the range
            start = next_line(path, start)
        elif raw["unit"] == "page":
            start = next_page(path, start, compression=raw["compression"])
        with reading(path), path.open("rb", buffering=0) as stream:
            stream.seek(start)
            sha256 = sha256_of(stream, raw["bytes"])
            has_more = end is None and bool(stream.read(1))
    except UserError as error:
        return str(error)
    if sha256 == raw["sha256"] and not has_more:
        return None
    return (
        f"{path}: bytes {start:,} to {start + raw['bytes']:,} are not the tokenized ones; restore "
        "the file, or touch it and rerun the workflow, which tokenizes it again"
    )
