"""The checkpoint of tokamake's own that a path is, or that the file `latest` in a folder names."""

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tokamake.checkpoint.description import describe_model, is_native
from tokamake.config import Architecture
from tokamake.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

REMEDY = (
    "give the folder of a training run, or make one of any other checkpoint with "
    "`tokamake convert --format native`"
)


class Description(NamedTuple):
    """What is known of a checkpoint of which no tensor is read."""

    path: Path
    """The folder that `latest` names."""
    architecture: Architecture
    """Shape of the model."""
    iteration: int
    """Steps trained."""


def latest(folder: Path) -> Path:
    """Checkpoint that `latest` of a folder points to.

    Raises:
        UserError: no `latest`, or what it names is missing.
    """
    pointer = folder / "latest"
    if not folder.is_dir():
        raise UserError(f"checkpoint {folder}: no such folder; {REMEDY}")
    if not pointer.is_file():
        raise UserError(
            f"checkpoint {folder}: has no file latest, so none is finished there; {REMEDY}"
        )
    name = pointer.read_text(encoding="utf-8", errors="replace").strip()
    if not name or Path(name).name != name:
        raise UserError(f"{pointer}: {name!r} is not the name of a folder; {REMEDY}")
    if not (folder / name).is_dir():
        others = sorted(path.name for path in folder.glob("global_step*") if path.is_dir())
        there = f" ({', '.join(others)})" if others else ""
        raise UserError(f"{pointer}: names {name}, which is missing; name one that is there{there}")
    return folder / name


def folder_of(path: Path) -> Path:
    """The checkpoint that a path is, if it is one of tokamake's own, or that its `latest` names.

    Raises:
        UserError: it is neither.
    """
    return path if is_native(path) else latest(path)


def describe(folder: Path) -> Description:
    """Open a checkpoint of tokamake's own, or the one that a folder's `latest` names.

    Raises:
        UserError: it is missing, of another format, or damaged as far as that can be seen.
    """
    path = folder_of(folder)
    if not is_native(path):
        raise UserError(f"checkpoint {folder}: not of tokamake's own format; {REMEDY}")
    return Description(path, *describe_model(path))


def read(folder: Path) -> "tuple[Architecture, dict[str, Tensor], int]":
    """Architecture, whole tensors by Hugging Face's names, and step of a checkpoint.

    Raises:
        UserError: it is missing, of another format, or damaged.
    """
    from tokamake.checkpoint import native

    return native.read(describe(folder).path)
