"""Atomic writes: a file is either complete or absent. tokamake writes all files with this module.

It writes a file under a temporary name in the same folder, calls fsync, and renames it. Links are
followed. Standard output (`-`), devices and pipes are written to directly.
"""

import ctypes
import hashlib
import json
import os
import re
import resource
import shutil
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from threading import get_ident
from typing import Any, BinaryIO

from tokamake.errors import UserError
from tokamake.temporary_names import temporary_name

_TEXT: Any = {"encoding": "utf-8", "errors": "surrogateescape"}
"""File names need not be UTF-8, and JSON files contain them."""


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file_system(folder: Path) -> None:
    """Flush all files and names of the file system of a folder to disk: syncfs(2).

    For thousands of files, one call is faster than `sync` of each file. It also waits for data of
    other processes. Before Linux 5.8, it reports no errors of the disk.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.syncfs(descriptor):
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error), str(folder))
    finally:
        os.close(descriptor)


STANDARD_OUTPUT = Path("-")


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
    *paths: Path, optional: Collection[Path] = (), vouching: int = 1, durable: bool = True
) -> Iterator[tuple[Path, ...]]:
    """Yield temporary paths to write; on success fsync and rename them in order, else remove them.

    The last paths are manifests of the first paths. Old manifests are removed first, new manifests
    are renamed last: a manifest never exists beside files that it does not describe.

    Args:
        optional: paths that need not be written. If one is not, its old file is removed.
        vouching: number of manifests at the end of `paths`.
        durable: whether to flush files and names to disk; False: the caller calls
            `sync_file_system` later, once for many files.
    """
    with _errors_naming(paths[0]):
        if len(paths) == 1 and (stream := _stream(paths[0])):
            from tempfile import TemporaryDirectory  # rarely needed, and takes milliseconds

            with stream, TemporaryDirectory() as folder:
                content = Path(folder, "content")
                yield (content,)
                sys.stdout.flush()
                with content.open("rb") as source:
                    shutil.copyfileobj(source, stream)
            return
        targets = {path: _target(path) for path in paths}
        temporaries = {path: temporary_name(target) for path, target in targets.items()}
        try:
            _unlink(temporaries.values())  # a dead process may have had our PID
            yield tuple(temporaries.values())
            unwritten = [path for path in optional if not temporaries[path].exists()]
            written = [path for path in paths if path not in unwritten]
            for path in written:
                # A link has no content of its own.
                if durable and not temporaries[path].is_symlink():
                    sync(temporaries[path])
            manifests = written[-vouching:] if len(paths) > 1 else []
            _remove(targets[path] for path in [*manifests, *unwritten])
            for path in written:
                temporaries[path].replace(targets[path])
            for parent in {target.parent for target in targets.values()} if durable else ():
                sync(parent)
        finally:
            _unlink(temporaries.values())


def _unlink(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def _stream(path: Path) -> BinaryIO | None:
    """Open standard output, a device or a pipe; None: `path` is a file or does not exist."""
    # /dev/stdout may be a file: opening it again would overwrite its content.
    for descriptor in (1, 2):
        if _names(path, descriptor):
            return os.fdopen(os.dup(descriptor), "wb")
    return path.open("wb") if is_stream(path) else None


def is_stream(path: Path) -> bool:
    """Whether a path is standard output or standard error, or another device or pipe."""
    if _names(path, 1) or _names(path, 2):
        return True
    return path.exists() and not path.is_file() and not path.is_dir()


def is_standard_output(path: Path) -> bool:
    """Whether a path is `-`, or names the file, device or pipe that standard output goes to."""
    return _names(path, 1)


def _names(path: Path, descriptor: int) -> bool:
    if path == STANDARD_OUTPUT:
        return descriptor == 1
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except OSError:
        return False


def _target(path: Path) -> Path:
    """The file or folder to replace: `path`, or the target of the link there. Make its parent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return Path(os.path.realpath(path)) if path.is_symlink() else path


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

    If `path` is a link, the folder that it names is replaced. An existing folder may hold only
    names that the new one has, and names that match the patterns `also`.
    """
    if path.exists() and not path.is_dir():
        raise UserError(f"{path}: a file is there; name a folder")
    path = _target(path)
    temporary = temporary_name(path)
    shutil.rmtree(temporary, ignore_errors=True)  # a dead process may have had our PID
    temporary.mkdir()
    try:
        yield temporary
        for entry in sorted(temporary.rglob("*"), reverse=True):
            sync(entry)
        sync(temporary)
        if path.exists():
            _refuse_foreign(path, temporary, also=also)
            old = temporary_name(path, "old")
            shutil.rmtree(old, ignore_errors=True)
            path.rename(old)
            temporary.rename(path)
            shutil.rmtree(old, ignore_errors=True)
        else:
            temporary.rename(path)
        sync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def emptied(folder: Path) -> Iterator[Path]:
    """A folder of intermediate files: empty at first, also after a kill; removed at the end."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _refuse_foreign(path: Path, temporary: Path, *, also: Iterable[str]) -> None:
    new_names = {entry.name for entry in temporary.iterdir()}
    names = sorted(entry.name for entry in path.iterdir() if entry.name not in new_names)
    foreign = [
        name for name in names if not any(fnmatch(name, pattern) for pattern in (".*", *also))
    ]
    if foreign:
        raise UserError(
            f"{path}: holds {foreign[0]}, which would be lost; name another folder or remove it"
        )


def write_link(link: Path, target: Path | str) -> None:
    """Make a link, or replace one, atomically; two threads may make the same one."""
    link.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(link)
    temporary = temporary.with_name(f"{temporary.name}-{get_ident()}")
    _unlink([temporary])
    temporary.symlink_to(target)
    temporary.replace(link)
    sync(link.parent)


def write_text(path: Path, text: str) -> None:
    with atomic(path) as (temporary,):
        temporary.write_text(text, **_TEXT)


def create_text(path: Path, text: str) -> None:
    """Create a file together with its content: a process that is killed leaves no part of it.

    FileExistsError: there is such a file.
    """
    temporary = temporary_name(path)
    try:
        temporary.write_text(text, encoding="utf-8")
        add_name(temporary, path)
    finally:
        _unlink([temporary])


def add_name(file: Path, name: Path) -> None:
    """Give a file a second name at once, or where there are no hard links, a copy.

    FileExistsError: the name is taken.
    """
    try:
        name.hardlink_to(file)
    except FileExistsError:
        # NFS may repeat a request that was answered, and then finds its own link.
        with suppress(FileNotFoundError):
            if name.samefile(file):
                return
        raise
    except OSError:
        with name.open("xb") as stream:
            stream.write(file.read_bytes())


def to_json(value: Any) -> str:
    """Format a value as JSON: two-space indents, keys in insertion order."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def write_json(path: Path, value: Any) -> None:
    write_text(path, to_json(value))


def read_json(path: Path, remedy: str) -> Any:
    """Read a JSON document; messages about a missing or invalid file end with `remedy`."""
    try:
        return json.loads(path.read_text(**_TEXT))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; {remedy}") from None
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits
        raise UserError(f"{path}: not valid JSON ({error}); {remedy}") from None


_SEAL = "sha256"


def write_sealed_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON object atomically, with the digest of its other keys as the key `sha256`."""
    write_text(path, to_sealed_json(value))


def to_sealed_json(value: dict[str, Any]) -> str:
    return to_json({**value, _SEAL: digest(value)})


def read_sealed_json(path: Path, remedy: str) -> dict[str, Any]:
    """Read a JSON object, check its key `sha256`, and return it without this key.

    A file without the key is one of an earlier version: it is not verified. Callers refuse keys
    that they do not know, so a damaged name of this key is found, too.
    """
    value = read_json(path, remedy)
    if not isinstance(value, dict):
        raise UserError(f"{path}: damaged: not a JSON object; {remedy}")
    seal = value.pop(_SEAL, None)
    if seal is not None and seal != digest(value):
        raise UserError(f"{path}: damaged: does not match its {_SEAL}; {remedy}")
    return value


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


def glob_expression(pattern: str) -> str:
    """Return the regular expression of a glob pattern; * stops at a slash, ** does not.

    A pattern without wildcards also matches the files in a folder of this name.
    """
    # Odd pieces are wildcards, even ones the text between them.
    pieces = re.split(r"(\*\*/?|\*|\?|\[!?\]?[^\]]*\])", pattern)
    wildcards = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    expression = "".join(
        wildcards.get(piece)
        or (
            f"[{'^' * (piece[1] == '!')}{piece[1:].removeprefix('!')}"
            if piece[:1] == "["
            else re.escape(piece)
        )
        for piece in pieces
    )
    return expression if len(pieces) > 1 else f"{expression.removesuffix('/')}(?:/.*)?"
