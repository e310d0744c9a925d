"""Token files one after the other: copied by the kernel, hashed by other threads as they arrive.

`merge` writes a merged .bin here. What is hashed is what was written, read back from memory, part
by part, so that many parts are hashed at once; `pairs.joined_sha256` makes one proof of the parts.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import IO, NamedTuple

import numpy as np

from tokamake import files
from tokamake.data.indexed.float_tokens import as_integers
from tokamake.data.indexed.kernel_copy import copy
from tokamake.data.indexed.manifest import HashedRange, hashed_ranges
from tokamake.data.indexed.merge_inputs import MergeInput
from tokamake.data.indexed.paths import bin_path, file_path
from tokamake.errors import UserError
from tokamake.runtime.console import progress

_BUFFER = 1 << 18
_FLUSH = 256 << 20
"""Bytes after which writing them to disk begins, so that not all is left to the end."""


class _Check(NamedTuple):
    """A hash on its way, and what it must be."""

    path: Path
    size: int
    expected: str | None
    found: Future[str]


class _Target:
    """The file that is written here: other threads hash what arrives, and bring it to disk."""

    def __init__(self, stream: IO[bytes], pool: ThreadPoolExecutor) -> None:
        self.stream = stream
        self._pool = pool
        self._arrivals: SimpleQueue[int | None] = SimpleQueue()
        self._unsynced = 0
        self._syncs: list[Future[None]] = []

    @contextmanager
    def piece(self) -> Iterator["Future[str]"]:
        """Give the hash of what is written until the block is left."""
        self._arrivals = SimpleQueue()
        try:
            yield self._pool.submit(_hash, self.stream.fileno(), self.stream.tell(), self._arrivals)
        finally:
            self._arrivals.put(None)

    def wrote(self, size: int) -> None:
        """Tell that so many bytes more are in the file."""
        self._arrivals.put(size)
        self._unsynced += size
        if self._unsynced >= _FLUSH and all(sync.done() for sync in self._syncs):
            self._flush()

    def finish(self, hashes: Iterable["Future[str]"]) -> None:
        """Wait until all is on disk and hashed."""
        self._flush()
        wait(hashes)
        for sync in self._syncs:
            sync.result()  # an error of the disk is told once, and here

    def _flush(self) -> None:
        self._syncs.append(self._pool.submit(os.fdatasync, self.stream.fileno()))
        self._unsynced = 0


def concatenate(
    parts: list[MergeInput], target: Path, dtype: type[np.integer]
) -> list[list[HashedRange]]:
    """Write the parts' tokens one after the other, and compare all their files with manifests.

    Args:
        parts: pairs in order.
        target: file to write.
        dtype: type of the tokens; floating-point numbers become it.

    Returns:
        Size and hash of the pieces that each part became, in order.

    Raises:
        UserError: a file of a part differs from its manifest, or became shorter.
    """
    threads = len(os.sched_getaffinity(0)) + 1  # one of them waits for the disk
    with target.open("w+b", buffering=0) as stream, ThreadPoolExecutor(threads) as pool:
        file = _Target(stream, pool)
        pieces: list[list[_Check]] = []
        pending: list[_Check] = []
        try:
            for part in progress(parts, label="merge", unit="pair"):
                others = _others(part, pool)
                pieces.append(_append(part, dtype, file))
                pending = _compared(pending + others + pieces[-1])
            file.finish(check.found for check in pending)
            _compared(pending)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [[HashedRange(check.size, check.found.result()) for check in part] for part in pieces]


def _others(part: MergeInput, pool: ThreadPoolExecutor) -> list[_Check]:
    """Have the index and the map of sources of one of our pairs hashed."""
    stated = part.stated["sha256"] if part.stated else {}
    paths = {name: file_path(part.prefix, name) for name in stated if name != "bin"}
    return [
        _Check(path, 0, stated[name], pool.submit(files.sha256, path))
        for name, path in paths.items()
        if name in ("idx", "sources")
    ]


def _append(part: MergeInput, dtype: type[np.integer], file: _Target) -> list[_Check]:
    """Write a part's tokens while they are hashed, in the pieces that its manifest tells."""
    path = bin_path(part.prefix)
    if part.dtype.kind == "f":
        with file.piece() as found:
            for tokens in as_integers(path, part.dtype, dtype):
                content = tokens.data.cast("B")
                while content:
                    written = file.stream.write(content)
                    file.wrote(written)
                    content = content[written:]
        return [_Check(path, part.tokens * np.dtype(dtype).itemsize, None, found)]
    checks = []
    with path.open("rb", buffering=0) as source:
        for size, expected in _pieces(part):
            with file.piece() as found:
                checks.append(_Check(path, size, expected, found))
                try:
                    for copied in copy(source.fileno(), file.stream.fileno(), size):
                        file.wrote(copied)
                except EOFError:
                    raise UserError(
                        f"{path}: became shorter while it was read; run again"
                    ) from None
    return checks


def _pieces(part: MergeInput) -> list[tuple[int, str | None]]:
    if part.stated is None:
        return [(part.tokens * part.dtype.itemsize, None)]
    return [(piece.size, piece.sha256) for piece in hashed_ranges(part.stated)]


def _hash(descriptor: int, start: int, arrivals: SimpleQueue[int | None]) -> str:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_BUFFER))
    while (left := arrivals.get()) is not None:
        while left:
            count = os.preadv(descriptor, [buffer[: min(left, _BUFFER)]], start)
            digest.update(buffer[:count])
            start, left = start + count, left - count
    return digest.hexdigest()


def _compared(checks: list[_Check]) -> list[_Check]:
    """Compare the hashes that are there already, and give back the other ones."""
    for check in checks:
        if check.found.done() and check.expected not in (None, check.found.result()):
            raise UserError(
                f"{check.path}: damaged, it differs from its manifest; remove it and run again"
            )
    return [check for check in checks if not check.found.done()]
