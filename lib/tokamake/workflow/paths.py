"""Where the workflow's files are, relative to its working directory."""

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from tokamake.config.data_set import RESERVED_NAMES, data_set_in
from tokamake.data.mixture.weigh import split_weights_path
from tokamake.errors import UserError

DOCTOR = "results/doctor"


def split_weights(weights: str, split: str) -> str:
    """Weighting file of a split other than the training split."""
    return str(split_weights_path(Path(weights), split))


def is_plan(path: str) -> bool:
    """Whether a file is the plan of a data folder."""
    folder, _, name = path.rpartition("/")
    return name == "plan.json" and data_set_in(folder) is not None


def record_path(output: str) -> Path | None:
    """File that records an output's inputs and params; None: it is not in `results/`.

    Records lie in the run's folder or the data folder, and move with it. Folders below are
    replaced as a whole.
    """
    path = Path(output)
    if "results" not in path.parts:
        return None
    within = path.parts[path.parts.index("results") + 1 :]
    depth = min(1, len(within) - 1)
    if within[0] in ("tokenizer", "extended_tokenizer"):
        depth = 0
    elif within[0] == "data" and len(within) > 2 and within[1] not in RESERVED_NAMES:
        depth = 2
    folder = path.parents[len(within) - depth - 1]
    return folder / ".made_from" / f"{path.relative_to(folder)}.json"


def check_writable(folders: Iterable[str]) -> None:
    """Check that folders can be written, or made if they do not exist."""
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


def check_room(folder: Path) -> None:
    """Check that a folder's disk is not full, by a file that has no name."""
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as stream:
            stream.write(bytes(1 << 16))
    except OSError as error:
        raise UserError(
            f"{folder}: {error.strerror}; free some space on its disk, then rerun"
        ) from None
