"""Temporary names of files that are being written, and removal of dead processes' files."""

import hashlib
import os
import re
import shutil
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path

_TEMPORARY_NAME = re.compile(r"\..+\.(?:tmp|old)-(.+-[0-9a-f]{12})-(\d+)")
"""`.<name>.tmp-<host>-<hash of boot and PID namespace>-<pid>`; see `process_place`."""
_ABANDONED_SECONDS = 7 * 24 * 3600
_swept: set[Path] = set()
"""Folders without stale files. Listing a large folder takes seconds, so list each folder once."""


@cache
def process_place() -> str:
    """Where a PID means one process: the host, and a hash of its boot and our PID namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        identity = boot + str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        identity = os.urandom(16).hex()  # no process can be proved dead
    return f"{os.uname().nodename}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"


def temporary_name(path: Path, kind: str = "tmp") -> Path:
    """Return a temporary name beside `path`; remove stale files there first."""
    if path.parent not in _swept:
        _swept.add(path.parent)
        _sweep(path.parent)
    return path.with_name(f".{path.name}.{kind}-{process_place()}-{os.getpid()}")


def _sweep(folder: Path) -> None:
    """Remove temporary files that dead processes left in a folder.

    A process of our host, boot and PID namespace is dead if its PID is free. For another
    place, we cannot know: its files are removed once all of them here are a week older than the
    last change of the folder. If such a process still runs, it fails at its rename, and publishes
    nothing.
    """
    files_of: dict[tuple[str, int], list[Path]] = defaultdict(list)
    for entry in os.scandir(folder):
        if match := _TEMPORARY_NAME.fullmatch(entry.name):
            files_of[match[1], int(match[2])].append(Path(entry.path))
    place = process_place()
    for (owner, pid), paths in files_of.items():
        with suppress(OSError):  # another process sweeps, too, or the files are another user's
            is_stale = not is_running(pid) if owner == place else _is_abandoned(folder, paths)
            if is_stale:
                for path in paths:
                    _discard(path)


def is_running(pid: int) -> bool:
    """Whether a process of our host and PID namespace runs."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's process
    return True


def _is_abandoned(folder: Path, paths: Iterable[Path]) -> bool:
    """Whether a process has changed none of its files in the last week of a folder."""
    entries = (entry for path in paths for entry in (path, *path.rglob("*")))
    last_change = max(entry.lstat().st_mtime for entry in entries)
    # The folder's time and the files' come from the same clocks; ours alone may be wrong.
    now = min(folder.stat().st_mtime, time.time())
    return now - last_change > _ABANDONED_SECONDS


def _discard(path: Path) -> None:
    if path.is_dir():
        # Rename first: if its process runs after all, it must not publish half a folder.
        removed = path.with_name(f".stale.old-{process_place()}-{os.getpid()}")
        path.rename(removed)
        shutil.rmtree(removed)
    else:
        path.unlink(missing_ok=True)
