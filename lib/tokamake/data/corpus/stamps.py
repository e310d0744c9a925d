"""Stamps of raw files. Jobs compare them with the plan before and after they read a file.

A shard is a byte range of the file that was planned. In another version of the file, byte ranges
of other jobs would leave documents out or repeat them.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from tokamake.data.readers import ByteRange, Input, open_input
from tokamake.errors import UserError

DECLARED = "declared"
"""Stamp of a file that did not exist when it was planned."""


def file_stamp(size: int, modified: int) -> str:
    """Return the stamp of a file: its size in bytes and its modification time in nanoseconds."""
    return f"{size}:{modified}"


def read_stamp(path: Path) -> str:
    try:
        status = path.stat()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); put it back") from None
    return file_stamp(status.st_size, status.st_mtime_ns)


def open_unchanged(
    paths: Sequence[Path],
    stamps: Sequence[str],
    *,
    byte_range: ByteRange | None = None,
    format: str = "",
) -> Iterator[Input]:
    """Open raw files one after the other; the caller reads each to its end before the next.

    Without `stamps`, files must not change while they are read; with them, not since the plan.
    """
    for path, planned in zip(paths, stamps or [DECLARED] * len(paths), strict=True):
        expected = read_stamp(path) if planned == DECLARED else planned
        _check(path, expected, when="since it was planned")
        before = _version(path)
        yield open_input(path, byte_range=byte_range, format=format)
        # Not sooner: the caller asks for the next file when it has read this one.
        _check(path, expected, when="while it was read")
        if _version(path) != before:
            raise UserError(
                f"{path}: written while it was read, and given its old time back; rerun when it is "
                "complete"
            )


def _version(path: Path) -> tuple[int, int]:
    """Inode, and time of the last change of the inode, which no program can set back."""
    status = path.stat()
    return status.st_ino, status.st_ctime_ns


def _check(path: Path, expected: str, *, when: str) -> None:
    if (actual := read_stamp(path)) != expected:
        raise UserError(
            f"{path}: changed {when} (bytes:time was {expected}, now {actual}); rerun when it is "
            "complete: the workflow plans it again"
        )
