"""Checks of file systems: space, files left, measured speed, locks, home or project space."""

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
"""Of the file that is written to measure."""
_FEW_BYTES, _NO_BYTES = 20e9, 1e9
_FEW_FILES, _NO_FILES = 100_000, 1_000
_SLOW = 20e6
"""Bytes a second."""


@dataclass(frozen=True)
class Speed:
    """What a file system did with a small file."""

    write: float
    """Bytes a second, fsync included."""
    read: float
    """Bytes a second; the system may have kept the file in memory."""
    locks: str
    """Why flock fails; empty where it works."""


def check_disks(
    directory: Path, data: Iterable[Path], *, cluster: bool, home: Path | None = None
) -> list[Result]:
    """File systems of results and of data, each once.

    Args:
        directory: where the workflow runs; results are written to its folder results.
        data: folders of raw data, which need not be writable.
        cluster: whether jobs run on other machines, for which a home is a bad place.
        home: of the user.
    """
    results, seen = [], set()
    for name, path in [("results", directory / "results"), *(("data", one) for one in data)]:
        folder = existing(path)
        if name == "data" and folder != path:
            results.append(
                wrong(f"disk of {path}", "no such folder, or not yours to see", "name another")
            )
            continue
        if (place := folder.stat().st_dev) not in seen:
            seen.add(place)
            results += check_disk(f"disk of {path}", folder, writes=name == "results")
    home = Path.home() if home is None else home
    if cluster and home.exists() and is_within(existing(directory), home):
        remedy = "homes are small and slow on most clusters; work in your project's space"
        results.append(warning("place", f"{directory.resolve()} is in your home", remedy))
    return results


def existing(path: Path) -> Path:
    """The nearest folder above a path, or itself, that is there."""
    path = path.absolute()
    folders = (folder for folder in (path, *path.parents) if os.path.isdir(folder))  # noqa: PTH112
    return next(folders)  # unlike Path.is_dir, it bears with folders that may not be read


def is_within(folder: Path, other: Path) -> bool:
    """Whether a folder is another or lies in it, also through links and mounts; both exist."""
    place = folder.resolve()
    return any(other.samefile(one) for one in (place, *place.parents))


def check_disk(name: str, folder: Path, *, writes: bool) -> list[Result]:
    """One file system."""
    results = [judge_space(name, folder)]
    try:
        speed = measure(folder)
    except OSError as error:
        if not writes and isinstance(error, PermissionError):
            return [*results, ok(f"{name}, speed", "not known: not writable, as it may be")]
        remedy = "work in a folder that you may write to, with space left"
        return [*results, wrong(f"{name}, speed", of_system(error), remedy)]
    return [*results, *judge_speed(name, speed)]


def judge_space(name: str, folder: Path) -> Result:
    """Free bytes and files; some file systems tell of no limit on files."""
    found = os.statvfs(folder)
    return judge_free(name, found.f_bavail * found.f_frsize, found.f_favail, found.f_files)


def judge_free(name: str, free: int, files: int, all_files: int) -> Result:
    """Result for free bytes, and free files of all that there can be (0: any number)."""
    left = f", {files:,} more files" if all_files else ""
    value = f"{free / 1e9:,.1f} GB free{left}"
    if free < _NO_BYTES or (all_files and files < _NO_FILES):
        return wrong(name, value, "delete what you do not need, or work on another file system")
    if free < _FEW_BYTES or (all_files and files < _FEW_FILES):
        return warning(name, value, "checkpoints and shards may not fit; make space")
    return ok(name, value)


def measure(folder: Path) -> Speed:
    """Write a file, bring it to disk and read it; the file is removed whatever happens.

    Raises:
        OSError: the folder is not writable or full.
    """
    block = os.urandom(2**20)
    with tempfile.NamedTemporaryFile(prefix=".doctor-", dir=folder) as file:
        descriptor = file.fileno()
        begin = time.perf_counter()
        for _ in range(_BYTES // len(block)):
            file.write(block)
        file.flush()
        os.fsync(descriptor)
        written = time.perf_counter()
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


def judge_speed(name: str, speed: Speed) -> list[Result]:
    """Results for what was measured."""
    value = f"writes {speed.write / 1e6:,.0f} MB/s, reads {speed.read / 1e6:,.0f} MB/s"
    slow = min(speed.write, speed.read) < _SLOW
    remedy = "it may be busy; measure again, or work on a parallel file system"
    results = [warning(f"{name}, speed", value, remedy) if slow else ok(f"{name}, speed", value)]
    if speed.locks:
        remedy = (
            "ask for Lustre's mount option flock; until then start no training twice in one folder"
        )
        return [*results, warning(f"{name}, flock", speed.locks, remedy)]
    return [*results, ok(f"{name}, flock", "works")]
