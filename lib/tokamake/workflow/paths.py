"""Where the workflow's files are, relative to its working directory."""

import os
from collections.abc import Iterable
from pathlib import Path

from tokamake.data.mixture.weigh import split_weights_path
from tokamake.errors import UserError

RUN = "results/{run}"
"""Folder of a run."""
DOCTOR = "results/doctor"


def split_weights(weights: str, split: str) -> str:
    """Weighting file of a split other than the training split.

    Args:
        weights: weighting file of the training split.
        split: name of the split.
    """
    return str(split_weights_path(Path(weights), split))


def check_writable(folders: Iterable[str]) -> None:
    """Check that folders can be written, or made if they do not exist.

    Raises:
        UserError: a path is a file or a link to nothing, or may not be written.
    """
    for folder in map(Path, folders):
        path = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
        if path.is_symlink() and not path.exists():
            raise UserError(
                f"{path}: a link to {path.readlink()}, which does not exist; make that folder, or "
                "fix the link"
            )
        if not path.is_dir():
            raise UserError(
                f"{path}: a file, but the workflow writes to {folder}/; rename the file"
            )
        if not os.access(path, os.W_OK | os.X_OK):
            raise UserError(
                f"{path}: cannot be written; change its permissions, or run in another folder"
            )
