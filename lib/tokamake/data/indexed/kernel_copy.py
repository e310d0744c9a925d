"""Copy bytes between files inside the kernel, with the fastest call that the file system supports.

`copy_file_range` shares blocks where the file system can (reflink), and a network file system
copies on its server. Where it is not supported, `sendfile` and then read and write follow.
"""

import errno
import fcntl
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

# Kernels and file systems differ in how they report an unsupported call.
_UNSUPPORTED = {
    errno.EXDEV,
    errno.ENOSYS,
    errno.EINVAL,
    errno.EOPNOTSUPP,
    errno.EPERM,
    errno.EBADF,
    errno.ENOTSOCK,
}
BLOCK = 8 << 20
_FIEMAP, _FIEMAP_SYNC = 0xC020660B, 1
"""ioctl of Linux that lists the extents of a file, and its flag to write the file out first."""
_REQUEST, _EXTENT = struct.Struct("=QQLLLL"), struct.Struct("=QQQQQLLLL")
_LAST, _SHARED = 0x1, 0x2000
"""Flags of an extent."""
_EXTENTS_AT_ONCE = 512

CopyCall = Callable[[int, int, int], int]


def _copy_file_range(source: int, target: int, size: int) -> int:
    return os.copy_file_range(source, target, size)


def _sendfile(source: int, target: int, size: int) -> int:
    # With an offset, sendfile does not move the position of the source.
    position = os.lseek(source, 0, os.SEEK_CUR)
    sent = os.sendfile(target, source, position, size)
    os.lseek(source, position + sent, os.SEEK_SET)
    return sent


def _read_and_write(source: int, target: int, size: int) -> int:
    block = memoryview(os.read(source, min(size, 1 << 20)))
    unwritten = block
    while unwritten:
        unwritten = unwritten[os.write(target, unwritten) :]
    return len(block)


METHODS: tuple[CopyCall, ...] = (_copy_file_range, _sendfile, _read_and_write)
"""Ways to copy up to `size` bytes between two descriptors at their positions, fastest first."""


def copy(source: int, target: int, size: int) -> Iterator[int]:
    """Copy `size` bytes between two open files at their positions; both positions advance.

    Yields the number of bytes of each copied block, at most `BLOCK`.
    """
    methods = list(METHODS)
    while size:
        try:
            copied = methods[0](source, target, min(size, BLOCK))
        except OSError as error:
            if error.errno not in _UNSUPPORTED or len(methods) == 1:
                raise
            copied = 0
        if copied:
            size -= copied
            yield copied
        elif len(methods) == 1:
            raise EOFError
        else:
            # Some file systems copy nothing instead of reporting an error. Try the next method;
            # the last one tells the end of the file for certain.
            del methods[0]


def shared_bytes(path: Path) -> int:
    """Return how many bytes of a file lie in disk blocks that other files share.

    0 where the file system does not say so; XFS and Btrfs do.
    """
    shared = start = 0
    with path.open("rb") as stream:
        while True:
            # Kernel's struct fiemap: start, length, flags, extents found, room for extents.
            request = _REQUEST.pack(start, 2**64 - 1 - start, _FIEMAP_SYNC, 0, _EXTENTS_AT_ONCE, 0)
            buffer = bytearray(request + bytes(_EXTENT.size * _EXTENTS_AT_ONCE))
            try:
                fcntl.ioctl(stream.fileno(), _FIEMAP, buffer)
            except OSError:
                return 0
            num_extents = _REQUEST.unpack_from(buffer)[3]
            for number in range(num_extents):
                extent = _EXTENT.unpack_from(buffer, _REQUEST.size + number * _EXTENT.size)
                logical, _, length, _, _, flags, *_ = extent
                shared += length if flags & _SHARED else 0
                start = logical + length
                if flags & _LAST:
                    return shared
            if not num_extents:
                return shared
