"""Job batches: several shards, or several merged datasets, that one job writes.

`tokenize` and `merge` build the missing members of a batch and write the batch file last. The
workflow asks for batch files only: 100,000 shards are a few hundred files to Snakemake.
"""

import json
import os
from collections.abc import Callable, Container, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from tokamake import files
from tokamake.data.indexed.manifest import find_fault, read_manifest
from tokamake.errors import UserError

Member = TypeVar("Member")
_DELETED = "deleted_inputs"
"""Key of a batch file: its datasets were made from shards that were deleted on purpose."""


def make_each(
    members: Iterable[Member], make: Callable[[Member], None], *, threads: int = 1
) -> None:
    """Call `make` for all members, also after one of them fails; then raise all errors as one.

    With several `threads`, a signal waits until the members in progress are finished.
    """

    def attempt(member: Member) -> str:
        try:
            make(member)
        except UserError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(threads) as pool:
        # A single member at a time stays in the main thread, where a signal ends it at once.
        attempts = pool.map(attempt, members) if threads > 1 else map(attempt, members)
        reasons = [reason for reason in attempts if reason]
    if reasons:
        raise UserError("\n".join(reasons))


def finished(prefixes: Iterable[Path], request: str) -> bool:
    """Whether all datasets are intact and were made from the inputs with the digest `request`."""
    return all(
        find_fault(prefix) is None and read_manifest(prefix).get("request") == request
        for prefix in prefixes
    )


def write_batch(
    path: Path, name: str, *, folder: Path, prefixes: Iterable[Path], keep_inputs: bool = True
) -> None:
    """Write the batch file of datasets below `folder`.

    Keys: `batch`, the name; `members`, a list of `prefix` (relative to the folder), `bytes` and
    `sha256` of each file, `documents` and `tokens`; `deleted_inputs`, if shards were deleted.
    """
    members = []
    for prefix in prefixes:
        manifest = read_manifest(prefix)
        copied = {key: manifest[key] for key in ("bytes", "sha256", "documents", "tokens")}
        members.append({"prefix": str(prefix.relative_to(folder)), **copied})
    deleted = {} if keep_inputs else {_DELETED: True}
    files.write_json(path, {"batch": name, "members": members, **deleted})


def has_deleted_inputs(path: Path) -> bool:
    """Whether a batch file says that the shards of its datasets were deleted on purpose."""
    try:
        return bool(_read_batch(path).get(_DELETED))
    except UserError:
        return False


def written(path: Path) -> tuple[int, int, int] | None:
    """Documents, tokens and bytes of tokens of a batch; None: `path` is no summary of a batch."""
    if "batches" not in path.parts:
        return None
    with suppress(OSError, ValueError, KeyError, TypeError):  # a display must not end a workflow
        members = json.loads(path.read_text(encoding="utf-8"))["members"]
        return (
            sum(each["documents"] for each in members),
            sum(each["tokens"] for each in members),
            sum(each["bytes"]["bin"] for each in members),
        )
    return None


def _read_batch(path: Path) -> dict[str, Any]:
    batch = files.read_json(path, "rerun the workflow")
    if not isinstance(batch, dict) or not {"batch", "members"} <= set(batch):
        raise UserError(f"{path}: not a batch file; remove it and rerun the workflow")
    return batch


def find_batch_fault(path: Path, folder: str, *, deleted: Container[str] = ()) -> str | None:
    """Return the first fault of a finished batch, or None if all its datasets are intact.

    A file counts as intact if it has the batch file's size for it and is not newer than the
    batch file: 100,000 datasets then take a second or two. `find_fault` checks each other
    file. Datasets in `deleted` may be missing.
    """
    try:
        written = path.stat().st_mtime_ns
        for member in _read_batch(path)["members"]:
            if member["prefix"] in deleted:
                continue
            prefix = f"{folder}/{member['prefix']}"
            if not _unchanged(prefix, member["bytes"], written=written):
                if fault := find_fault(Path(prefix)):
                    return fault
                # An intact dataset can still be a newer one than the batch file describes.
                if read_manifest(Path(prefix))["sha256"] != member["sha256"]:
                    return f"{prefix} does not match {path}"
    except FileNotFoundError:
        return f"{path} is missing"
    except UserError as error:
        return str(error).partition(";")[0]
    except (AttributeError, KeyError, TypeError, ValueError):
        return f"{path} is damaged"
    return None


def _unchanged(prefix: str, sizes: dict[str, int], *, written: int) -> bool:
    # Strings and os.stat: pathlib would take most of the time for 100,000 datasets.
    try:
        stats = {name: os.stat(f"{prefix}.{name}") for name in (*sizes, "json")}  # noqa: PTH116
    except FileNotFoundError:
        return False
    return all(stat.st_mtime_ns <= written for stat in stats.values()) and all(
        stats[name].st_size == size for name, size in sizes.items()
    )
