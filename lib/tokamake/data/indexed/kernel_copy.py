"""Copies bytes from file to file inside the kernel, by the best means that the file system has.

`copy_file_range` shares blocks where the file system can (reflink) and copies on the server of a
network file system; where it is not supported, `sendfile` or plain reading and writing follow.
"""

import errno
import os
from collections.abc import Callable, Iterator

_UNSUPPORTED = {
    errno.EXDEV,
    errno.ENOSYS,
    errno.EINVAL,
    errno.EOPNOTSUPP,
    errno.EPERM,
    errno.EBADF,
    errno.ENOTSOCK,
}
_BLOCK = 8 << 20

Method = Callable[[int, int, int], int]


def _copy_file_range(source: int, target: int, size: int) -> int:
    return os.copy_file_range(source, target, size)


def _sendfile(source: int, target: int, size: int) -> int:
    at = os.lseek(source, 0, os.SEEK_CUR)
    sent = os.sendfile(target, source, at, size)
    os.lseek(source, at + sent, os.SEEK_SET)
    return sent


def _read_and_write(source: int, target: int, size: int) -> int:
    block = memoryview(os.read(source, min(size, 1 << 20)))
    left = block
    while left:
        left = left[os.write(target, left) :]
    return len(block)


METHODS: tuple[Method, ...] = (_copy_file_range, _sendfile, _read_and_write)
"""Ways to copy up to `size` bytes between two descriptors at their positions, the best first."""


def copy(source: int, target: int, size: int, *, block: int = _BLOCK) -> Iterator[int]:
    """Copy `size` bytes between two open files at their positions; both positions advance.

    Args:
        source: descriptor to read.
        target: descriptor to write.
        size: bytes to copy.
        block: bytes copied at once, at most.

    Yields:
        Bytes of each block copied.

    Raises:
        EOFError: the source ends earlier.
    """
    methods = list(METHODS)
    while size:
        try:
            copied = methods[0](source, target, min(size, block))
        except OSError as error:
            if error.errno not in _UNSUPPORTED or len(methods) == 1:
                raise
            copied = 0
        if copied:
            size -= copied
            yield copied
        elif len(methods) == 1:
            raise EOFError
        else:  # not supported; some file systems say so by copying nothing
            del methods[0]
