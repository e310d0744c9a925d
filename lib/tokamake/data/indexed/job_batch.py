"""Batches: several shards, or several merged pairs, that one job makes one after the other.

`tokenize` and `merge` make the members that are not whole yet and write the batch file last; the
workflow asks for nothing else, so that 100,000 shards are a few hundred files to it.
"""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from tokamake import files
from tokamake.data.indexed.manifest import find_fault, read_manifest
from tokamake.errors import UserError

Member = TypeVar("Member")


def make_each(members: Iterable[Member], make: Callable[[Member], None]) -> None:
    """Make all members; one that fails does not keep the others from being made.

    Raises:
        UserError: the reasons of all that failed, a line each.
    """
    reasons = []
    for member in members:
        try:
            make(member)
        except UserError as error:
            reasons.append(str(error))
    if reasons:
        raise UserError("\n".join(reasons))


def finished(prefixes: Iterable[Path], request: str) -> bool:
    """Tell whether pairs are whole and were made from just what `request` is a digest of."""
    return all(
        find_fault(prefix) is None and read_manifest(prefix).get("request") == request
        for prefix in prefixes
    )


def write_batch(path: Path, name: str, folder: Path, prefixes: Iterable[Path]) -> None:
    """Write a batch file: what its pairs, below `folder`, hold.

    It has `batch`, and `members`: a list of `prefix` (relative to the folder), `bytes` and `sha256`
    of each file, and counts of documents and tokens.
    """
    members = []
    for prefix in prefixes:
        stated = read_manifest(prefix)
        kept = {key: stated[key] for key in ("bytes", "sha256", "documents", "tokens")}
        members.append({"prefix": str(prefix.relative_to(folder)), **kept})
    files.write_json(path, {"batch": name, "members": members})


def read_batch(path: Path) -> dict[str, Any]:
    """Read a batch file.

    Raises:
        UserError: it is missing or no batch file.
    """
    value = files.read_json(path, "run the workflow again")
    if not isinstance(value, dict) or not {"batch", "members"} <= set(value):
        raise UserError(f"{path}: not a batch file; remove it and run the workflow again")
    return value


def find_batch_fault(path: Path, folder: str) -> str | None:
    """Say what is wrong with a finished batch, or None if all its pairs below `folder` are whole.

    Files that have the size the batch file states and are no newer than it are taken as whole, so
    that asking about 100,000 pairs takes a second or two; `pairs.broken` is asked about others.
    """
    try:
        written = path.stat().st_mtime_ns
        for member in read_batch(path)["members"]:
            prefix = f"{folder}/{member['prefix']}"
            if not _untouched(prefix, member["bytes"], written):
                if fault := find_fault(Path(prefix)):
                    return fault
                if read_manifest(Path(prefix))["sha256"] != member["sha256"]:
                    return f"{prefix} is another than {path} says"
    except FileNotFoundError:
        return f"{path} is missing"
    except UserError as error:
        return str(error).partition(";")[0]
    return None


def _untouched(prefix: str, sizes: dict[str, int], written: int) -> bool:
    try:
        stats = {name: os.stat(f"{prefix}.{name}") for name in (*sizes, "json")}  # noqa: PTH116
    except FileNotFoundError:
        return False
    return all(stat.st_mtime_ns <= written for stat in stats.values()) and all(
        stats[name].st_size == size for name, size in sizes.items()
    )
