"""Opens a checkpoint of whatever format its files are in."""

from pathlib import Path

from tokamake import plugins
from tokamake.checkpoint.opened import Opened
from tokamake.errors import UserError

FOLDER = "checkpoint/formats"
"""Where the formats are."""


def open_any(path: Path) -> Opened:
    """Tell a checkpoint's format from its files, and open it.

    Args:
        path: folder of the checkpoint, or one whose `latest` names it.

    Raises:
        UserError: there is none, or it is damaged.
    """
    for name in plugins.names(FOLDER):
        plug_in = plugins.load(FOLDER, name)
        if folder := plug_in.find(path):
            found: Opened = plug_in.opened(folder)
            return found
    if not path.is_dir():
        problem = "is a file" if path.exists() else "no such folder"
        raise UserError(f"{path}: {problem}; give the folder of a checkpoint")
    known = ", ".join(name.replace("_", "-") for name in plugins.names(FOLDER))
    raise UserError(
        f"{path}: no checkpoint of a format that is known ({known}); give its folder, or one whose "
        f"file latest names it{_named(path)}"
    )


def _named(path: Path) -> str:
    """What a file `latest` names that is none."""
    pointer = path / "latest"
    if not pointer.is_file():
        return ""
    name = pointer.read_text(encoding="utf-8", errors="replace").strip()
    return f" (here it names {name}, in which no rank has its first file)"


def title(name: str) -> str:
    """What a format is called."""
    found: str = plugins.constant(FOLDER, name, "TITLE")
    return found
