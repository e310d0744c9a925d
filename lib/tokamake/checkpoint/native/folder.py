"""Folder of a native checkpoint: find it, read its description `tokamake.json`. No torch."""

import hashlib
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tokamake import files
from tokamake.checkpoint.latest import REMEDY, latest
from tokamake.checkpoint.torch_files import dcp_metadata
from tokamake.config.architecture import Architecture
from tokamake.config_files import validate
from tokamake.errors import UserError

DESCRIPTION = "tokamake.json"
"""File with version, architecture and progress; only native checkpoints have it."""
VERSION = 1
_REMEDY = "name another checkpoint"
_NEEDED = {"world_size", "architecture", "iteration", "loss_scale"}
_NUMBERS = ("world_size", "iteration", "consumed_samples", "consumed_tokens")
"""Whole numbers of a description."""
_FILES = "files"
"""Key of a description: hashes of the other files; earlier versions wrote none."""
_END_BYTES = 1024
"""Bytes at the end of an archive with the CRC-32s of all its records."""


class NativeCheckpoint(NamedTuple):
    """A native checkpoint whose tensors stay on disk."""

    path: Path
    """Its folder, after `latest` is resolved."""
    architecture: Architecture
    iteration: int
    """Number of steps trained."""


def is_native(folder: Path) -> bool:
    """Whether a folder is itself a native checkpoint; `latest` is not resolved."""
    return (folder / DESCRIPTION).is_file()


def find(path: Path) -> Path | None:
    """Return the folder of a native checkpoint: `path`, or its `latest`'s target; else None."""
    try:
        folder = locate(path)
    except UserError:
        return None
    return folder if is_native(folder) else None


def locate(path: Path) -> Path:
    """Return `path` if it is a native checkpoint, else the folder that its `latest` names."""
    return path if is_native(path) else latest(path)


def read_description(folder: Path) -> dict[str, Any]:
    """Read a checkpoint's description: version, world_size, architecture, progress."""
    description = files.read_sealed_json(folder / DESCRIPTION, _REMEDY)
    if description.get("version") != VERSION:
        raise UserError(
            f"{folder}: has version {description.get('version')}, this tokamake reads {VERSION}; "
            f"{_REMEDY}"
        )
    if missing := sorted(_NEEDED - description.keys()):
        raise UserError(f"{folder / DESCRIPTION}: has no {missing[0]}; {_REMEDY}")
    for name in _NUMBERS:
        if not isinstance(description.get(name, 0), int):
            raise UserError(
                f"{folder / DESCRIPTION}: {name} {description[name]!r}: damaged: not a whole "
                f"number; {_REMEDY}"
            )
    return description


def check_files(folder: Path) -> None:
    """Check that a checkpoint has all its files, each long enough; no tensor is read."""
    description, tensors = read_description(folder), dcp_metadata.read(folder)
    stated = description.get(_FILES) or {}
    dcp_metadata.check_files(folder, dcp_metadata.Contents(tensors, {}))
    if not stated:
        if problem := _odd_key(tensors.keys(), num_ranks=description["world_size"]):
            raise UserError(f"{folder / dcp_metadata.FILE}: damaged: {problem}; {_REMEDY}")
        return
    for name, digest in _hashes(folder):
        if stated.get(name) != digest:
            raise UserError(
                f"{folder / name}: damaged: does not match its hash in {DESCRIPTION}; {_REMEDY}"
            )


def _odd_key(keys: Collection[str], *, num_ranks: int) -> str:
    """Describe a damaged or missing key of a checkpoint without hashes; "" if there is none."""
    kinds = Counter(key.split(".")[1] for key in keys if key.startswith("optimizer."))
    for key in keys:
        prefix, _, name = key.partition(".")
        if prefix == "optimizer":
            kind, _, name = name.partition(".")
            # Each kind of state belongs to several parameters.
            is_known = f"model.{name}" in keys and kinds[kind] > 1
        else:
            is_known = prefix == "model" or (prefix == "rank" and name.isdecimal())
        if not is_known:
            return f"has {key!r}, which is no tensor of a run"
    missing = (rank for rank in range(num_ranks) if f"rank.{rank}" not in keys)
    return next((f"has no rank.{rank}" for rank in missing), "")


def seal(folder: Path) -> None:
    """Note the hashes of a checkpoint's files in its description, once they are complete."""
    description = files.read_sealed_json(folder / DESCRIPTION, _REMEDY)
    files.write_sealed_json(folder / DESCRIPTION, {**description, _FILES: dict(_hashes(folder))})


def _hashes(folder: Path) -> Iterator[tuple[str, str]]:
    """Name and SHA-256 of `.metadata`, then of the ends of the archives in each file."""
    yield dcp_metadata.FILE, files.sha256(folder / dcp_metadata.FILE)
    for file, archives in sorted(dcp_metadata.archives(folder).items()):
        ends = hashlib.sha256()
        with file.open("rb") as stream:
            for start, length in archives:
                skipped = max(length - _END_BYTES, 0)
                stream.seek(start + skipped)
                ends.update(stream.read(length - skipped))
        yield file.name, ends.hexdigest()


def read_model(folder: Path) -> tuple[Architecture, int]:
    """Read a checkpoint's architecture and number of steps."""
    description = read_description(folder)
    if not (folder / dcp_metadata.FILE).is_file():
        raise UserError(f"{folder / dcp_metadata.FILE}: no such file; {_REMEDY}")
    architecture = validate(Architecture, description["architecture"], str(folder))
    return architecture, int(description["iteration"])


def open_native(path: Path) -> NativeCheckpoint:
    """Open a native checkpoint: the folder, or the checkpoint that its `latest` names."""
    folder = locate(path)
    if not is_native(folder):
        raise UserError(f"checkpoint {path}: not in tokamake's native format; {REMEDY}")
    check_files(folder)
    return NativeCheckpoint(folder, *read_model(folder))
