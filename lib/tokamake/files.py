"""Atomic writes: a file is either complete or absent. tokamake writes all files with this module.

It writes a file under a temporary name in the same folder, calls fsync, and renames it.
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
"""File names need not be UTF-8, and JSON files contain them."""


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_STALE_NAME = re.compile(r"\..+\.tmp-(.+)-(\d+)")
_swept: set[Path] = set()
"""Folders without stale files. Listing a large folder takes seconds, so list each folder once."""


def _temporary(path: Path) -> Path:
    """Return a temporary name beside `path`. Remove files that killed processes here left."""
    if path.parent not in _swept:
        _swept.add(path.parent)
        for entry in os.scandir(path.parent):
            match = _STALE_NAME.fullmatch(entry.name)
            if match and match[1] == _HOST and not Path(f"/proc/{match[2]}").exists():
                stale = Path(entry.path)
                shutil.rmtree(stale) if entry.is_dir() else stale.unlink(missing_ok=True)
    return path.with_name(f".{path.name}.tmp-{_HOST}-{os.getpid()}")


@contextmanager
def _errors_naming(path: Path) -> Iterator[None]:
    """Make errors of the disk name the final file instead of the temporary one."""
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

    The last paths are manifests of the others. Old manifests are removed first and new ones are
    renamed last, so a manifest never exists beside files that it does not describe.

    Args:
        paths: files to write.
        optional: paths that need not be written. If one is not, its old file is removed.
        vouching: number of manifests at the end of `paths`.
    """
    with _errors_naming(paths[0]):
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
        temporaries = {path: _temporary(path) for path in paths}
        try:
            yield tuple(temporaries.values())
            unwritten = [path for path in optional if not temporaries[path].exists()]
            written = [path for path in paths if path not in unwritten]
            for path in written:
                sync(temporaries[path])
            _remove([*(written[-vouching:] if len(paths) > 1 else []), *unwritten])
            for path in written:
                temporaries[path].replace(path)
            for folder in {path.parent for path in paths}:
                sync(folder)
        finally:
            for temporary in temporaries.values():
                temporary.unlink(missing_ok=True)


def _remove(paths: Iterable[Path]) -> None:
    """Remove files that exist, and flush the removal to disk before other changes."""
    existing = [path for path in paths if path.exists()]
    for path in existing:
        path.unlink()
    for folder in {path.parent for path in existing}:
        sync(folder)


@contextmanager
def atomic_folder(path: Path, *, also: Iterable[str] = ()) -> Iterator[Path]:
    """Yield a temporary folder to fill; on success it replaces `path`, else it is removed.

    Args:
        path: folder to write. An existing one may hold only names that the new one also has.
        also: patterns of other names that an existing folder may hold.

    Raises:
        UserError: `path` is a file, or a folder that holds other files, which would be lost.
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
    new_names = {entry.name for entry in temporary.iterdir()}
    names = sorted(entry.name for entry in path.iterdir() if entry.name not in new_names)
    foreign = [
        name for name in names if not any(fnmatch(name, pattern) for pattern in (".*", *also))
    ]
    if foreign:
        raise UserError(
            f"{path}: holds {foreign[0]}, which would be lost; name another folder or remove it"
        )


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text atomically."""
    with atomic(path) as (temporary,):
        temporary.write_text(text, **_TEXT)


def to_json(value: Any) -> str:
    """Format a value as JSON: two-space indents, keys in insertion order."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def write_json(path: Path, value: Any) -> None:
    """Write a JSON document atomically."""
    write_text(path, to_json(value))


def read_json(path: Path, remedy: str) -> Any:
    """Read a JSON document.

    Raises:
        UserError: the file is missing or not valid JSON; the message ends with `remedy`.
    """
    try:
        return json.loads(path.read_text(**_TEXT))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; {remedy}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid JSON ({error}); {remedy}") from None


def sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def digest(value: Any) -> str:
    """SHA-256 of a JSON-serializable value, independent of key order, in hexadecimal."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def allow_open_files() -> None:
    """Raise the limit of open files to the maximum; the default is often 1,024."""
    _, maximum = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (maximum, maximum))
