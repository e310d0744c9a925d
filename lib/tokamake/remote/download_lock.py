"""Lock of a download: one thread of one process writes it, and all other threads wait.

`flock` does not work on all parallel file systems; hard links do. The lock is a file that names its
owner. It is taken over when its owner is dead, or has written nothing for an hour.
"""

import os
import time
from contextlib import suppress
from pathlib import Path
from threading import get_ident

from tokamake.files import add_name
from tokamake.temporary_names import is_running, process_place

_ABANDONED_SECONDS = 3600
"""Time without a byte after which nobody writes a download any more."""


def claim(path: Path, partial: Path) -> bool:
    """Take the lock of a download; False: another thread or process has it.

    The time of `partial` shows whether the owner still writes.
    """
    lock, takeover = beside(path, "lock"), beside(path, "takeover")
    own = beside(path, f"{process_place()}-{os.getpid()}-{get_ident()}")
    own.write_text(f"{process_place()} {os.getpid()}")
    try:
        if not _is_stale(lock, partial):
            return _link(own, lock)
        # If several find it stale, one at a time looks again and removes it.
        if _is_old(takeover):
            takeover.unlink(missing_ok=True)
        if not _link(own, takeover):
            return False
        try:
            if _is_stale(lock, partial):
                lock.unlink()
            return _link(own, lock)
        finally:
            takeover.unlink()
    finally:
        own.unlink()


def release(path: Path) -> None:
    beside(path, "lock").unlink(missing_ok=True)


def beside(path: Path, kind: str) -> Path:
    """Path of a temporary file of a download. No listed name has an exclamation mark."""
    return path.with_name(f"{path.name}!{kind}")


def _link(own: Path, name: Path) -> bool:
    """Give a file a second name; False: the name is taken."""
    try:
        add_name(own, name)
    except FileExistsError:
        return False
    return True


def _is_stale(lock: Path, partial: Path) -> bool:
    try:
        owner = lock.read_text().split()
    except FileNotFoundError:
        return False
    is_dead = owner[:1] == [process_place()] and not is_running(int(owner[1]))
    return is_dead or (_is_old(lock) and (_is_old(partial) or not partial.exists()))


def _is_old(path: Path) -> bool:
    with suppress(FileNotFoundError):
        return time.time() - path.stat().st_mtime > _ABANDONED_SECONDS
    return False
