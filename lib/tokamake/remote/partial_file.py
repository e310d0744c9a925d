"""Beginnings of downloads: each has one owner, so that two processes never write into one.

File locks do not work everywhere; renames do. A process renames the beginning that it continues to
a name of its own, and gives the name up when it fails. What a dead process has left is taken over.
"""

import os
import re
import time
from contextlib import suppress
from pathlib import Path
from threading import get_ident

from tokamake.files import is_running, process_place

_ABANDONED_SECONDS = 3600
"""Age of what a process on another machine has left, which cannot be asked whether it runs."""
_OWNED = re.compile(r".*\.incomplete-(.+)-(\d+)-\d+")
"""NAME.incomplete-PLACE-PID-THREAD."""


def claim(path: Path) -> Path:
    """Return the name of a beginning of `path` that only this thread has; it may exist already."""
    own = path.with_name(f"{path.name}.incomplete-{process_place()}-{os.getpid()}-{get_ident()}")
    for beginning in sorted(path.parent.glob(f"{_escaped(path.name)}.incomplete*")):
        if beginning != own and _is_free(beginning):
            with suppress(FileNotFoundError):  # another process was faster
                beginning.rename(own)
                break
    return own


def release(partial: Path, path: Path) -> None:
    """Leave a beginning to whoever continues it."""
    if partial.exists():
        partial.rename(path.with_name(f"{path.name}.incomplete"))


def _is_free(beginning: Path) -> bool:
    if not (owner := _OWNED.fullmatch(beginning.name)):
        return True
    place, pid = owner.groups()
    if place == process_place():
        return not is_running(int(pid))
    try:
        return time.time() - beginning.stat().st_mtime > _ABANDONED_SECONDS
    except FileNotFoundError:
        return False


def _escaped(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)
