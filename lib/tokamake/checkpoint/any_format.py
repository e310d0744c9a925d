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
    problem = "no such folder" if not path.is_dir() else "no checkpoint of a format that is known"
    raise UserError(
        f"{path}: {problem}; give a folder of {', '.join(titles())}, or one with a file latest"
    )


def titles() -> list[str]:
    """What the formats are called."""
    return [plugins.constant(FOLDER, name, "TITLE") for name in plugins.names(FOLDER)]


def title(name: str) -> str:
    """What a format is called."""
    found: str = plugins.constant(FOLDER, name, "TITLE")
    return found
