"""What a checkpoint of tokamake's own says of itself, in a file beside its tensors; no torch."""

from pathlib import Path
from typing import Any

from tokamake import files
from tokamake.checkpoint.format_files import DESCRIPTION
from tokamake.checkpoint.native import dcp_metadata
from tokamake.config.architecture import Architecture
from tokamake.errors import UserError
from tokamake.validation import validate

VERSION = 1


def is_native(folder: Path) -> bool:
    """Whether a folder is a checkpoint of this format."""
    return (folder / DESCRIPTION).is_file()


def describe(folder: Path) -> dict[str, Any]:
    """What a checkpoint says of itself: version, world_size, architecture, progress."""
    found: dict[str, Any] = files.read_json(folder / DESCRIPTION, "name a checkpoint of tokamake")
    if found.get("version") != VERSION:
        raise UserError(
            f"{folder}: is of version {found.get('version')}, this tokamake reads {VERSION}"
        )
    needed = {"world_size", "architecture", "iteration", "loss_scale"}
    if missing := sorted(needed - found.keys()):
        raise UserError(f"{folder / DESCRIPTION}: has no {missing[0]}; name another checkpoint")
    return found


def describe_model(folder: Path) -> tuple[Architecture, int]:
    """Architecture and step of a checkpoint.

    Raises:
        UserError: it is not whole, as far as that can be seen without reading it.
    """
    described = describe(folder)
    if not (folder / dcp_metadata.FILE).is_file():
        raise UserError(f"{folder / dcp_metadata.FILE}: no such file; name another checkpoint")
    architecture = validate(Architecture, described["architecture"], str(folder))
    return architecture, int(described["iteration"])
