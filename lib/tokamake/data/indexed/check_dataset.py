"""Check an indexed dataset in constant memory: files, index, manifest and tokens."""

import hashlib
import io
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokamake import files
from tokamake.data.indexed.dataset import DTYPES, IndexedDataset
from tokamake.data.indexed.index_reader import IndexLayout, read_layout
from tokamake.data.indexed.manifest import (
    HashedRange,
    differs_from_manifest,
    find_manifest,
    hashed_ranges,
)
from tokamake.data.indexed.manifest_counts import count_faults
from tokamake.data.indexed.merge_inputs import (
    check_bounds,
    check_sequence_starts,
    check_size,
    size_faults,
)
from tokamake.data.indexed.paths import bin_path, file_path, idx_path, manifest_path
from tokamake.errors import UserError
from tokamake.runtime.console import counted

_BLOCK = 1 << 20
_TASK_TOKENS = 1 << 24
_BLOCK_TOKENS = 1 << 17
"""Small enough for the processor's cache: a block is read twice."""
_REBUILD = "remove the dataset and rebuild it"


class CheckedDataset(NamedTuple):
    """Contents of an indexed dataset, as far as they are readable, and its faults."""

    prefix: Path
    faults: list[str]
    """One line each: what, where and the remedy. Empty if the dataset is intact."""
    manifest: dict[str, Any] | None
    """None for a dataset of another program."""
    layout: IndexLayout | None
    """Columns of its index; None if the index is unreadable."""
    tokens: int
    """Sum of the lengths in the index."""
    bytes: dict[str, int]
    """Sizes of the existing files: bin, idx."""
    sha256: dict[str, str]
    """Hashes of the .bin and .idx files, if there is no manifest."""

    @property
    def dtype(self) -> np.dtype | None:
        return None if self.layout is None else np.dtype(DTYPES[self.layout.code])


def check_dataset(prefix: Path, *, read_tokens: bool) -> CheckedDataset:
    """Check an indexed dataset; collect faults instead of raising them.

    Compare sizes, lengths, pointers and document bounds with one another and with the manifest.
    With `read_tokens`, or without a manifest, compare the hashes of all files with the manifest,
    and each token with the vocabulary size.
    """
    faults: list[str] = []
    manifest = layout = None
    with _collect(faults):
        manifest = find_manifest(prefix)
    faults += size_faults(prefix, manifest, names=manifest["bytes"]) if manifest else []
    sizes = {}
    if manifest is None and not any(file_path(prefix, name).is_file() for name in ("bin", "idx")):
        faults.append(
            f"{prefix}: no dataset: there is neither {prefix}.bin nor {prefix}.idx; fix the prefix"
        )
        return CheckedDataset(prefix, faults, None, None, 0, {}, {})
    for name in ("bin", "idx"):
        path = file_path(prefix, name)
        if path.is_file():
            sizes[name] = path.stat().st_size
        elif manifest is None:
            faults.append(f"{path}: no such file; name datasets without .bin or .idx")
    if "idx" in sizes:
        with _collect(faults):
            layout = _trainable_layout(idx_path(prefix))
    tokens = layout.tokens() if layout else 0
    dataset = CheckedDataset(prefix, faults, manifest, layout, tokens, sizes, {})
    _check_index(dataset)
    if manifest:
        faults += [*_count_faults(dataset), *_contradictions(prefix, manifest)]
    if read_tokens or not manifest:
        return dataset._replace(sha256=_check_content(dataset))
    return dataset


@contextmanager
def _collect(faults: list[str]) -> Iterator[None]:
    """Append the message of a UserError to `faults` instead of raising it."""
    try:
        yield
    except UserError as error:
        faults.append(str(error))


def _trainable_layout(idx: Path) -> IndexLayout:
    """Return the columns of an index that current versions of Megatron can read."""
    layout = read_layout(idx)
    if layout.in_tokens:
        raise UserError(f"{idx}: a cached or lazy index (TNTIDX); `tokamake merge` converts it")
    if layout.code in (6, 7):
        raise UserError(f"{idx}: floating-point tokens; `tokamake merge` converts them")
    if layout.code not in DTYPES:
        raise UserError(f"{idx}: dtype code {layout.code} is not a known token format; {_REBUILD}")
    return layout


def _check_index(dataset: CheckedDataset) -> None:
    layout, dtype = dataset.layout, dataset.dtype
    if layout is None or dtype is None:
        return
    with _collect(dataset.faults):
        check_sequence_starts(dataset.prefix, layout, itemsize=dtype.itemsize)
    with _collect(dataset.faults):
        check_bounds(dataset.prefix, layout)
    if "bin" in dataset.bytes:
        with _collect(dataset.faults):
            check_size(dataset.prefix, dataset.tokens * dtype.itemsize)


def _count_faults(dataset: CheckedDataset) -> Iterator[str]:
    manifest, layout, dtype = dataset.manifest, dataset.layout, dataset.dtype
    if manifest is None or layout is None or dtype is None:
        return
    if missing := [key for key in ("documents", "sequences", "tokens") if key not in manifest]:
        yield f"{manifest_path(dataset.prefix)}: no {', '.join(missing)}; {_REBUILD}"
        return
    # `documents` in the manifest excludes empty documents. The index has them only if `tokenize`
    # was asked to keep them, so both counts are valid. A merge with datasets of other programs
    # does not know the number of empty documents.
    non_empty, empty = manifest["documents"], manifest.get("empty_documents") or 0
    documents = layout.bounds.length - 1
    expected = documents if non_empty <= documents <= non_empty + empty else non_empty
    for what, in_index, in_manifest in (
        ("tokens", dataset.tokens, manifest["tokens"]),
        ("sequences", layout.lengths.length, manifest["sequences"]),
        ("documents", documents, expected),
        ("dtype", dtype.name, manifest.get("dtype") or dtype.name),
    ):
        if in_index != in_manifest:
            yield (
                f"{dataset.prefix}: its index differs from its manifest: {what} {in_index}, the "
                f"manifest says {in_manifest}; {_REBUILD}"
            )


def _contradictions(prefix: Path, manifest: dict[str, Any]) -> Iterator[str]:
    for fault in count_faults(manifest):
        yield f"{manifest_path(prefix)}: counts do not add up: {fault}; {_REBUILD}"


def _check_content(dataset: CheckedDataset) -> dict[str, str]:
    """Read all files and add faults of hashes and tokens; return the hashes if no manifest."""
    prefix, manifest = dataset.prefix, dataset.manifest
    hashes: dict[str, str] = {}
    if "bin" in dataset.bytes:
        expected = hashed_ranges(manifest) if manifest else []
        scan = TokenScan(dataset.dtype, manifest.get("vocab_size") if manifest else None)
        ranges = list(scan.hash_ranges(bin_path(prefix), [hashed.size for hashed in expected]))
        dataset.faults.extend(_range_faults(prefix, ranges, expected=expected))
        dataset.faults.extend(scan.faults(bin_path(prefix)))
        hashes["bin"] = ranges[0].sha256
    if manifest is None:
        if "idx" in dataset.bytes:
            hashes["idx"] = files.sha256(idx_path(prefix))
        return hashes
    for name in manifest["sha256"]:
        path = file_path(prefix, name)
        if name != "bin" and path.is_file() and differs_from_manifest(prefix, manifest, name=name):
            dataset.faults.append(f"{path}: differs from the hash in its manifest; {_REBUILD}")
    return {}


def _range_faults(
    prefix: Path, ranges: list[HashedRange], *, expected: list[HashedRange]
) -> Iterator[str]:
    first = 0
    # Not strict: a file that is too long has one range more.
    for number, (actual, stated) in enumerate(zip(ranges, expected, strict=False), 1):
        if actual != stated:
            where = f"its part {number} of {len(expected)} " if len(expected) > 1 else ""
            yield (
                f"{bin_path(prefix)}: {where}(bytes {first:,} to {first + stated.size:,}) "
                f"differs from the hash in its manifest; {_REBUILD}"
            )
        first += stated.size


def _fill(stream: io.FileIO, block: memoryview) -> int:
    """Read bytes until a block is full or the file ends; return their number."""
    count = 0
    while count < len(block) and (read := stream.readinto(block[count:])):
        count += read
    return count


class TokenScan:
    """One pass over a token file: hash its byte ranges and count invalid tokens.

    `num_open` counts documents whose last token is not `eod`.
    """

    def __init__(
        self,
        dtype: np.dtype | None,
        vocab_size: int | None,
        *,
        last_tokens: NDArray[np.int64] | None = None,
        eod: int | None = None,
    ) -> None:
        """Set the conditions that tokens must meet; without `dtype`, only hash.

        Tokens must be below `vocab_size`, or without it not negative. `last_tokens` (documents,)
        has the ascending position of the last token of each document, which must be `eod`.
        """
        self.num_open = 0
        self._last_tokens = np.zeros(0, np.int64) if last_tokens is None else last_tokens
        self._eod = eod
        self._dtype = dtype
        self._vocab_size = vocab_size
        self._num_invalid = self._num_tokens = 0
        self._first_invalid: tuple[int, int] | None = None  # position and token

    def hash_ranges(self, binary: Path, sizes: list[int]) -> Iterator[HashedRange]:
        """Yield size and hash of consecutive ranges of these sizes, then of the remaining bytes."""
        # One buffer: the kernel would have to clear new memory for each block.
        buffer = memoryview(bytearray(_BLOCK))
        with binary.open("rb", buffering=0) as stream:
            remaining = binary.stat().st_size - sum(sizes)
            for size in [*sizes, remaining] if remaining > 0 or not sizes else sizes:
                digest, unread = hashlib.sha256(), size
                while unread and (count := _fill(stream, buffer[: min(_BLOCK, unread)])):
                    digest.update(buffer[:count])
                    self._check_tokens(buffer[:count])
                    unread -= count
                yield HashedRange(size - unread, digest.hexdigest())

    def _check_tokens(self, block: memoryview) -> None:
        if self._dtype is None:
            return
        count = len(block) // self._dtype.itemsize
        tokens = np.frombuffer(block, self._dtype, count)
        highest = np.iinfo(self._dtype).max if self._vocab_size is None else self._vocab_size - 1
        # min and max need no temporary array; most blocks are valid.
        is_signed = self._dtype.kind == "i"
        if len(tokens) and (tokens.max() > highest or (is_signed and tokens.min() < 0)):
            invalid = (tokens < 0) | (tokens > highest)
            if self._first_invalid is None:
                position = int(invalid.argmax())
                self._first_invalid = self._num_tokens + position, int(tokens[position])
            self._num_invalid += int(np.count_nonzero(invalid))
        bounds = self._num_tokens, self._num_tokens + len(tokens)
        first, end = np.searchsorted(self._last_tokens, bounds)
        last = tokens[self._last_tokens[first:end] - self._num_tokens]
        self.num_open += int(np.count_nonzero(last != self._eod))
        self._num_tokens += len(tokens)

    def faults(self, binary: Path) -> Iterator[str]:
        """Describe tokens outside the vocabulary."""
        if self._first_invalid is None:
            return
        position, token = self._first_invalid
        limit = "" if self._vocab_size is None else f" of {self._vocab_size:,} entries"
        invalid = counted(self._num_invalid, "token")
        yield (
            f"{binary}: {invalid} not in the vocabulary{limit}, the first "
            f"is token {position:,}: {token}; tokenize again with the tokenizer of the training"
        )


def stated_vocabulary(prefix: Path) -> int | None:
    """Return the vocabulary size that the manifest of a dataset states, if any."""
    manifest = find_manifest(prefix)
    return manifest.get("vocab_size") if manifest else None


def check_foreign(prefix: Path) -> int:
    """Check index and tokens of a dataset; return its largest token, -1 if none.

    Lengths and tokens must not be negative, pointers must follow from the lengths, and document
    bounds must ascend.
    """
    dataset = IndexedDataset(prefix)
    layout = read_layout(idx_path(prefix))
    check_sequence_starts(prefix, layout, itemsize=np.dtype(dataset.dtype).itemsize)
    check_bounds(prefix, layout)
    tasks = range(0, len(dataset.tokens), _TASK_TOKENS)
    # Threads suffice: min and max of numpy release the interpreter lock.
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        bounds = list(pool.map(lambda first: _bounds(dataset, first), tasks))
    if min((smallest for smallest, _ in bounds), default=0) < 0:
        first = next(
            first for first, (smallest, _) in zip(tasks, bounds, strict=True) if smallest < 0
        )
        position = first + int((dataset.tokens[first : first + _TASK_TOKENS] < 0).argmax())
        raise UserError(
            f"{bin_path(prefix)}: token {position:,} is {dataset.tokens[position]}, below 0; "
            "tokenize again, or leave the dataset out"
        )
    return max((largest for _, largest in bounds), default=-1)


def _bounds(dataset: IndexedDataset, first: int) -> tuple[int, int]:
    """Return the smallest and the largest of the tokens of a task, which begins at `first`."""
    smallest, largest = 0, -1
    is_signed = np.iinfo(dataset.dtype).min < 0
    stop = min(first + _TASK_TOKENS, len(dataset.tokens))
    for start in range(first, stop, _BLOCK_TOKENS):
        block = dataset.tokens[start : min(start + _BLOCK_TOKENS, stop)]
        largest = max(largest, int(block.max()))
        if is_signed:
            smallest = min(smallest, int(block.min()))
    return smallest, largest
