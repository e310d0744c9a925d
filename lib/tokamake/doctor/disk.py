"""Checks of file systems: free space and files, speed, locks, home or project space."""

import fcntl
import os
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tokamake.doctor.result import Result, ok, warning, wrong
from tokamake.errors import of_system

_BYTES = 2**24
"""Size of the file for the measurement."""
_FEW_BYTES, _NO_BYTES = 20e9, 1e9
_FEW_FILES, _NO_FILES = 100_000, 1_000
"""Free bytes and files below which the result is a warning, or wrong."""
_SLOW = 20e6
"""Bytes per second below which the result is a warning."""


@dataclass(frozen=True)
class Speed:
    """Speed of a file system with a small file."""

    write: float
    """Bytes per second, including fsync."""
    read: float
    """Bytes per second; the page cache may hold the file."""
    locks: str
    """Reason why flock fails; empty if it works."""


def check_disks(directory: Path, data: Iterable[Path], *, cluster: bool) -> list[Result]:
    """Check the file systems of results and data, each file system once.

    Folders of data need not be writable. On a cluster, a home is a bad place for results.
    """
    results, seen = [], set()
    for name, path in [("results", directory / "results"), *(("data", path) for path in data)]:
        folder = existing(path)
        if name == "data" and folder != path:
            results.append(
                wrong(f"disk of {path}", "no such folder, or no permission", "name another folder")
            )
            continue
        if (device := folder.stat().st_dev) not in seen:
            seen.add(device)
            results += check_disk(f"disk of {path}", folder, writes=name == "results")
    home = Path.home()
    if cluster and home.exists() and is_within(existing(directory), home):
        remedy = "homes are small and slow on most clusters; work in project space"
        results.append(warning("place", f"{directory.resolve()} is in your home", remedy))
    return results


def existing(path: Path) -> Path:
    """The path itself if it is a folder, else its nearest existing parent."""
    path = path.absolute()
    folders = (folder for folder in (path, *path.parents) if os.path.isdir(folder))  # noqa: PTH112
    return next(folders)  # Path.is_dir raises for parents without permission; isdir does not.


def is_within(folder: Path, parent: Path) -> bool:
    """Whether a folder equals or is inside `parent`, also through links and mounts; both exist."""
    resolved = folder.resolve()
    return any(parent.samefile(path) for path in (resolved, *resolved.parents))


def check_disk(name: str, folder: Path, *, writes: bool) -> list[Result]:
    """Check space, speed and locks of a file system."""
    space = os.statvfs(folder)
    free = space.f_bavail * space.f_frsize
    results = [free_result(name, free, files=space.f_favail, all_files=space.f_files)]
    try:
        speed = measure(folder)
    except OSError as error:
        if not writes and isinstance(error, PermissionError):
            return [*results, ok(f"{name}, speed", "not known: read-only, which data may be")]
        remedy = "work in a writable folder with free space"
        return [*results, wrong(f"{name}, speed", of_system(error), remedy)]
    return [*results, *speed_results(name, speed)]


def free_result(name: str, free: int, *, files: int, all_files: int) -> Result:
    """Return the result for free bytes and free files; `all_files` 0: no limit is reported."""
    free_files = f", {files:,} more files" if all_files else ""
    value = f"{free / 1e9:,.1f} GB free{free_files}"
    if free < _NO_BYTES or (all_files and files < _NO_FILES):
        return wrong(name, value, "delete files, or work on another file system")
    if free < _FEW_BYTES or (all_files and files < _FEW_FILES):
        return warning(name, value, "checkpoints and shards may not fit; make space")
    return ok(name, value)


def measure(folder: Path) -> Speed:
    """Write a temporary file, flush it to disk and read it."""
    block = os.urandom(2**20)
    with tempfile.NamedTemporaryFile(prefix=".doctor-", dir=folder) as file:
        descriptor = file.fileno()
        begin = time.perf_counter()
        for _ in range(_BYTES // len(block)):
            file.write(block)
        file.flush()
        os.fsync(descriptor)
        written = time.perf_counter()
        # Drop the file from the page cache; otherwise the read measures memory.
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        while file.read(len(block)):
            pass
        end = time.perf_counter()
        return Speed(_BYTES / (written - begin), _BYTES / (end - written), _locks(descriptor))


def _locks(descriptor: int) -> str:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return of_system(error)
    return ""


def speed_results(name: str, speed: Speed) -> list[Result]:
    """Return the results for a measured speed."""
    value = f"writes {speed.write / 1e6:,.0f} MB/s, reads {speed.read / 1e6:,.0f} MB/s"
    slow = min(speed.write, speed.read) < _SLOW
    remedy = "the disk may be busy; measure again, or work on a parallel file system"
    results = [warning(f"{name}, speed", value, remedy) if slow else ok(f"{name}, speed", value)]
    if speed.locks:
        remedy = (
            "ask your site for Lustre's mount option flock; until then, never run two trainings in "
            "the same folder"
        )
        return [*results, warning(f"{name}, flock", speed.locks, remedy)]
    return [*results, ok(f"{name}, flock", "works")]
