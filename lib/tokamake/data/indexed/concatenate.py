"""Concatenate token files: the kernel copies them, other threads hash them as they arrive.

`merge` writes a merged .bin file with it. The threads hash the written bytes, read back from the
page cache. Each input has its own hash, so several inputs are hashed in parallel;
`manifest.joined_sha256` combines the hashes.
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
from tokamake.data.indexed.kernel_copy import copy
from tokamake.data.indexed.manifest import HashedRange, hashed_ranges
from tokamake.data.indexed.merge_inputs import MergeInput, as_integers
from tokamake.data.indexed.paths import bin_path, file_path
from tokamake.errors import UserError
from tokamake.runtime.console import progress

_BUFFER = 1 << 18
_SYNC_BYTES = 256 << 20
"""Unsynced bytes that start an fdatasync, so that the last one does not have to write them all."""


class _HashCheck(NamedTuple):
    """A hash that a thread computes, and its expected value."""

    path: Path
    size: int
    expected: str | None
    """None: the input has no manifest."""
    sha256: Future[str]


class _TokenFile:
    """The output file: pool threads hash its new bytes and flush them to disk."""

    def __init__(self, stream: IO[bytes], pool: ThreadPoolExecutor) -> None:
        self.stream = stream
        self._pool = pool
        self._new_bytes: SimpleQueue[int | None] = SimpleQueue()
        self._unsynced = 0
        self._syncs: list[Future[None]] = []

    @contextmanager
    def hashed_range(self) -> Iterator["Future[str]"]:
        """Yield the future hash of all bytes written within the block."""
        self._new_bytes = SimpleQueue()
        start = self.stream.tell()
        try:
            yield self._pool.submit(_hash, self.stream.fileno(), start, self._new_bytes)
        finally:
            self._new_bytes.put(None)

    def wrote(self, size: int) -> None:
        self._new_bytes.put(size)
        self._unsynced += size
        # One sync at a time: a second one would only take a thread from hashing.
        if self._unsynced >= _SYNC_BYTES and all(sync.done() for sync in self._syncs):
            self._sync()

    def finish(self, hashes: Iterable["Future[str]"]) -> None:
        """Wait until all bytes are on disk and hashed."""
        self._sync()
        wait(hashes)
        for sync in self._syncs:
            sync.result()  # the kernel reports a disk error to one fdatasync only: look at all

    def _sync(self) -> None:
        self._syncs.append(self._pool.submit(os.fdatasync, self.stream.fileno()))
        self._unsynced = 0


def concatenate(
    inputs: list[MergeInput], target: Path, *, dtype: type[np.integer]
) -> list[list[HashedRange]]:
    """Write the tokens of the inputs one after the other; compare all files with the manifests.

    Floating-point tokens become `dtype`. Returns, for each input, sizes and hashes of its byte
    ranges in the target.
    """
    threads = len(os.sched_getaffinity(0)) + 1  # one thread waits for the disk
    with target.open("w+b", buffering=0) as stream, ThreadPoolExecutor(threads) as pool:
        output = _TokenFile(stream, pool)
        checks: list[list[_HashCheck]] = []
        pending: list[_HashCheck] = []
        try:
            for dataset in progress(inputs, label="merge", unit="datasets"):
                index_checks = _check_index_files(dataset, pool)
                checks.append(_append(dataset, dtype, output=output))
                # Compare early: a damaged input should not cost the copy of all inputs.
                pending = _compare_finished(pending + index_checks + checks[-1])
            output.finish(check.sha256 for check in pending)
            _compare_finished(pending)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [
        [HashedRange(check.size, check.sha256.result()) for check in of_input]
        for of_input in checks
    ]


def _check_index_files(dataset: MergeInput, pool: ThreadPoolExecutor) -> list[_HashCheck]:
    """Start to hash the index and the sources file of a dataset with a manifest."""
    hashes = dataset.manifest["sha256"] if dataset.manifest else {}
    paths = {name: file_path(dataset.prefix, name) for name in ("idx", "sources") if name in hashes}
    return [
        _HashCheck(path, 0, hashes[name], pool.submit(files.sha256, path))
        for name, path in paths.items()
    ]


def _append(
    dataset: MergeInput, dtype: type[np.integer], *, output: _TokenFile
) -> list[_HashCheck]:
    path = bin_path(dataset.prefix)
    if dataset.dtype.kind == "f":
        return [_append_floats(dataset, dtype, output=output)]
    checks = []
    with path.open("rb", buffering=0) as source:
        for size, expected in _ranges(dataset):
            with output.hashed_range() as sha256:
                checks.append(_HashCheck(path, size, expected, sha256))
                try:
                    for copied in copy(source.fileno(), output.stream.fileno(), size):
                        output.wrote(copied)
                except EOFError:
                    raise UserError(f"{path}: was truncated while being read; rerun") from None
    return checks


def _append_floats(
    dataset: MergeInput, dtype: type[np.integer], *, output: _TokenFile
) -> _HashCheck:
    path = bin_path(dataset.prefix)
    with output.hashed_range() as sha256:
        for tokens in as_integers(path, dataset.dtype, target_dtype=dtype):
            content = tokens.data.cast("B")
            while content:
                written = output.stream.write(content)
                output.wrote(written)
                content = content[written:]
    # The manifest hashes the floating-point bytes, so there is nothing to compare with.
    return _HashCheck(path, dataset.tokens * np.dtype(dtype).itemsize, None, sha256)


def _ranges(dataset: MergeInput) -> list[tuple[int, str | None]]:
    if dataset.manifest is None:
        return [(dataset.tokens * dataset.dtype.itemsize, None)]
    return [(hashed.size, hashed.sha256) for hashed in hashed_ranges(dataset.manifest)]


def _hash(descriptor: int, start: int, new_bytes: SimpleQueue[int | None]) -> str:
    """Hash a file from `start` on, as many bytes as the queue announces, up to None."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_BUFFER))
    while (size := new_bytes.get()) is not None:
        while size:
            count = os.preadv(descriptor, [buffer[: min(size, _BUFFER)]], start)
            digest.update(buffer[:count])
            start, size = start + count, size - count
    return digest.hexdigest()


def _compare_finished(checks: list[_HashCheck]) -> list[_HashCheck]:
    """Compare the hashes that are ready; return the checks that are not."""
    # Select first: a hash that becomes ready during the loop must not be dropped uncompared.
    pending = [check for check in checks if not check.sha256.done()]
    for check in checks:
        if check.sha256.done() and check.expected not in (None, check.sha256.result()):
            raise UserError(
                f"{check.path}: damaged, it differs from its manifest; remove the dataset and rerun"
            )
    return pending
