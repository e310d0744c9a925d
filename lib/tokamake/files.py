"""Whole files or none: everything tokamake writes passes through here.

A file is written under a temporary name in its own folder, fsynced, then renamed.
"""

import hashlib
import json
import os
import re
import resource
import shutil
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from tokamake.errors import UserError

_HOST = os.uname().nodename
_TEXT: Any = {"encoding": "utf-8", "errors": "surrogateescape"}
"""File names need not be UTF-8, and JSON files hold names."""


def sync(path: Path) -> None:
    """Flush a file or folder entry to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_LEFT_BEHIND = re.compile(r"\..+\.tmp-(.+)-(\d+)")
_swept: set[Path] = set()
"""Folders in which nothing of killed processes is left: listing a large one takes seconds."""


def _temporary(path: Path) -> Path:
    """A name to write under; what killed processes of this host left beside it is removed."""
    if path.parent not in _swept:
        _swept.add(path.parent)
        for entry in os.scandir(path.parent):
            match = _LEFT_BEHIND.fullmatch(entry.name)
            if match and match[1] == _HOST and not Path(f"/proc/{match[2]}").exists():
                stale = Path(entry.path)
                shutil.rmtree(stale) if entry.is_dir() else stale.unlink(missing_ok=True)
    return path.with_name(f".{path.name}.tmp-{_HOST}-{os.getpid()}")


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Have errors of the disk name the file that is being made."""
    try:
        yield
    except OSError as error:
        if error.filename is None or ".tmp-" in str(error.filename):
            raise OSError(error.errno, f"{error.strerror}, while writing", str(path)) from error
        raise


@contextmanager
def atomic(
    *paths: Path, optional: Collection[Path] = (), vouching: int = 1
) -> Iterator[tuple[Path, ...]]:
    """Yield temporary paths to write; on success fsync and rename them in order, else remove them.

    The last of several paths vouch for the others: earlier ones of their names go first, and the
    new ones come last, so that at no instant they stand beside files that they do not describe.

    Args:
        paths: files to make.
        optional: those of them that need not be written; then an earlier one is removed.
        vouching: number of paths, the last ones, that vouch.
    """
    with _named(paths[0]):
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
        temporaries = {path: _temporary(path) for path in paths}
        try:
            yield tuple(temporaries.values())
            gone = [path for path in optional if not temporaries[path].exists()]
            kept = [path for path in paths if path not in gone]
            for path in kept:
                sync(temporaries[path])
            _remove([*(kept[-vouching:] if len(paths) > 1 else []), *gone])
            for path in kept:
                temporaries[path].replace(path)
            for folder in {path.parent for path in paths}:
                sync(folder)
        finally:
            for temporary in temporaries.values():
                temporary.unlink(missing_ok=True)


def _remove(paths: Iterable[Path]) -> None:
    """Remove files that may be there, for good before anything else happens."""
    found = [path for path in paths if path.exists()]
    for path in found:
        path.unlink()
    for folder in {path.parent for path in found}:
        sync(folder)


@contextmanager
def atomic_folder(path: Path, *, also: Iterable[str] = ()) -> Iterator[Path]:
    """Yield a temporary folder to fill; on success it replaces `path`, else it is removed.

    Args:
        path: folder to make. If it is there, it may hold what the new one holds, and nothing else.
        also: patterns of names that it may hold besides, from an earlier time.

    Raises:
        UserError: `path` is a file, or a folder with something in it that would be lost.
    """
    if path.exists() and not path.is_dir():
        raise UserError(f"{path}: a file is there; name a folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(path)
    temporary.mkdir()
    try:
        yield temporary
        for entry in sorted(temporary.rglob("*"), reverse=True):
            sync(entry)
        sync(temporary)
        if path.exists():
            _refuse_foreign(path, temporary, also)
            old = path.with_name(f".{path.name}.old-{os.getpid()}")
            path.rename(old)
            temporary.rename(path)
            shutil.rmtree(old)
        else:
            temporary.rename(path)
        sync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _refuse_foreign(path: Path, temporary: Path, also: Iterable[str]) -> None:
    ours = {entry.name for entry in temporary.iterdir()}
    names = sorted(entry.name for entry in path.iterdir() if entry.name not in ours)
    foreign = [name for name in names if not any(fnmatch(name, part) for part in (".*", *also))]
    if foreign:
        raise UserError(
            f"{path}: holds {foreign[0]}, which would be lost; name another folder or remove it"
        )


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text atomically."""
    with atomic(path) as (temporary,):
        temporary.write_text(text, **_TEXT)


def to_json(value: Any) -> str:
    """Write a value as JSON text: two-space indents, keys in the order given."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def write_json(path: Path, value: Any) -> None:
    """Write a JSON document atomically."""
    write_text(path, to_json(value))


def read_json(path: Path, remedy: str) -> Any:
    """Read a JSON document, or say which file is missing or broken and what to do (`remedy`)."""
    try:
        return json.loads(path.read_text(**_TEXT))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; {remedy}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid JSON ({error}); {remedy}") from None


def sha256(path: Path) -> str:
    """Hash of a file's bytes, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def digest(value: Any) -> str:
    """Hash of a JSON-serializable value that does not depend on key order, in hexadecimal."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def allow_open_files() -> None:
    """Let this process have as many files open as the system allows; shells often say 1,024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
