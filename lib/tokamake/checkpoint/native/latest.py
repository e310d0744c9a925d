"""Opens a native checkpoint: a path is its folder, or one whose file `latest` names it."""

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tokamake.checkpoint.latest import REMEDY, latest
from tokamake.checkpoint.native.description import describe_model, is_native
from tokamake.config.architecture import Architecture
from tokamake.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor


class Description(NamedTuple):
    """What is known of a checkpoint of which no tensor is read."""

    path: Path
    """The folder that `latest` names."""
    architecture: Architecture
    """Shape of the model."""
    iteration: int
    """Steps trained."""


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
    from tokamake.checkpoint.native import training_state

    return training_state.read(describe(folder).path)
