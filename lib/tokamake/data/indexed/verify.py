"""Whether a pair is whole: its files, its index, its manifest and its tokens, with every fault.

`describe` asks. Columns of the index and tokens are read a block at a time, so that memory does not
grow with the pair.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tokamake import files
from tokamake.data.indexed.dataset import DTYPES
from tokamake.data.indexed.index_formats import IndexLayout, read_layout
from tokamake.data.indexed.manifest import HashedRange, differs_from_manifest, hashed_ranges
from tokamake.data.indexed.merge_inputs import (
    check_bounds,
    check_size,
    check_starts,
    find_manifest,
    wrong_sizes,
)
from tokamake.data.indexed.paths import bin_path, file_path, idx_path
from tokamake.errors import UserError

_BLOCK = 1 << 20
_AGAIN = "remove the pair and make it again"


class VerifiedDataset(NamedTuple):
    """What a pair holds, as far as it could be read, and what is wrong with it."""

    prefix: Path
    """Its path without .bin or .idx."""
    faults: list[str]
    """What, where and the remedy, a line each; none: the pair is whole."""
    stated: dict[str, Any] | None
    """Its manifest; None for a pair of another program."""
    layout: IndexLayout | None
    """Where the numbers of its index stand; None where that cannot be told."""
    tokens: int
    """Sum of its lengths."""
    bytes: dict[str, int]
    """Sizes of the files that are there: bin, idx."""
    sha256: dict[str, str]
    """Hashes of the .bin and .idx file, of a pair without a manifest."""

    @property
    def dtype(self) -> np.dtype | None:
        """Type of its tokens."""
        return None if self.layout is None else np.dtype(DTYPES[self.layout.code])


def verify(prefix: Path, *, read_tokens: bool) -> VerifiedDataset:
    """Check a pair; nothing that is wrong with it is an exception.

    Compared are the files' sizes, lengths, pointers and document bounds with one another and with
    the manifest. Where tokens are read, too, all files are compared with the manifest's hashes, and
    each token with the size of the vocabulary.

    Args:
        prefix: the pair, named without .bin or .idx.
        read_tokens: whether to read and hash all of it; that of a pair without a manifest always
            is.
    """
    faults: list[str] = []
    stated = layout = None
    with _noting(faults):
        stated = find_manifest(prefix)
    faults += wrong_sizes(prefix, stated, stated["bytes"]) if stated else []
    sizes = {}
    for name in ("bin", "idx"):
        path = file_path(prefix, name)
        if path.is_file():
            sizes[name] = path.stat().st_size
        elif stated is None:
            faults.append(f"{path}: no such file; name pairs without .bin or .idx")
    if "idx" in sizes:
        with _noting(faults):
            layout = _plain_layout(idx_path(prefix))
    found = VerifiedDataset(
        prefix, faults, stated, layout, layout.tokens() if layout else 0, sizes, {}
    )
    _check_index(found)
    if stated:
        faults += _wrong_counts(found)
    if read_tokens or not stated:
        return found._replace(sha256=_check_content(found))
    return found


@contextmanager
def _noting(faults: list[str]) -> Iterator[None]:
    """Note a mistake instead of raising it."""
    try:
        yield
    except UserError as error:
        faults.append(str(error))


def _plain_layout(idx: Path) -> IndexLayout:
    """Columns of an index that every Megatron of today reads."""
    layout = read_layout(idx)
    if layout.in_tokens:
        raise UserError(f"{idx}: a cached or lazy index (TNTIDX); `tokamake merge` converts it")
    if layout.code in (6, 7):
        raise UserError(f"{idx}: floating-point tokens; `tokamake merge` converts them")
    if layout.code not in DTYPES:
        raise UserError(f"{idx}: dtype code {layout.code} is not a known token format; {_AGAIN}")
    return layout


def _check_index(found: VerifiedDataset) -> None:
    """Compare lengths, pointers, document bounds and the size of the token file."""
    layout, dtype = found.layout, found.dtype
    if layout is None or dtype is None:
        return
    with _noting(found.faults):
        check_starts(found.prefix, layout, dtype.itemsize)
    with _noting(found.faults):
        check_bounds(found.prefix, layout)
    if "bin" in found.bytes:
        with _noting(found.faults):
            check_size(found.prefix, found.tokens * dtype.itemsize)


def _wrong_counts(found: VerifiedDataset) -> Iterator[str]:
    """Compare the counts of the index with those that the manifest states."""
    stated, layout, dtype = found.stated, found.layout, found.dtype
    if stated is None or layout is None or dtype is None:
        return
    # Documents without a token are counted apart, and stand in the index only if asked for. How
    # many there are, and all else that no index tells, is not known of other programs' pairs.
    counted, empty = stated["documents"], stated.get("empty_documents") or 0
    documents = layout.bounds.length - 1
    possible = documents if counted <= documents <= counted + empty else counted
    for what, own, theirs in (
        ("tokens", found.tokens, stated["tokens"]),
        ("sequences", layout.lengths.length, stated["sequences"]),
        ("documents", documents, possible),
        ("dtype", dtype.name, stated.get("dtype") or dtype.name),
    ):
        if own != theirs:
            yield (
                f"{found.prefix}: its index differs from its manifest: {what} {own}, stated "
                f"{theirs}; {_AGAIN}"
            )


def _check_content(found: VerifiedDataset) -> dict[str, str]:
    """Read all of a pair: compare hashes and tokens; the hashes of one without a manifest."""
    prefix, stated = found.prefix, found.stated
    hashes: dict[str, str] = {}
    if "bin" in found.bytes:
        wanted = hashed_ranges(stated) if stated else []
        scan = _Scan(found.dtype, stated.get("vocab_size") if stated else None)
        pieces = list(scan.pieces(bin_path(prefix), [piece.size for piece in wanted]))
        found.faults.extend(_wrong_pieces(prefix, pieces, wanted))
        found.faults.extend(scan.faults(bin_path(prefix)))
        hashes["bin"] = pieces[0].sha256
    if stated is None and "idx" in found.bytes:
        hashes["idx"] = files.sha256(idx_path(prefix))
    for name in stated["sha256"] if stated else ():
        path = file_path(prefix, name)
        if name != "bin" and path.is_file() and differs_from_manifest(prefix, stated or {}, name):
            found.faults.append(f"{path}: differs from the hash in its manifest; {_AGAIN}")
    return {} if stated else hashes


def _wrong_pieces(
    prefix: Path, found: list[HashedRange], wanted: list[HashedRange]
) -> Iterator[str]:
    """Tell where a token file is another than its manifest says."""
    first = 0
    for place, (own, theirs) in enumerate(zip(found, wanted, strict=False), 1):
        if own != theirs:
            where = f"its part {place} of {len(wanted)} " if len(wanted) > 1 else ""
            yield (
                f"{bin_path(prefix)}: {where}(bytes {first:,} to {first + theirs.size:,}) "
                f"differs from the hash in its manifest; {_AGAIN}"
            )
        first += theirs.size


class _Scan:
    """Reads a token file once: hashes of its pieces, and tokens that cannot be."""

    def __init__(self, dtype: np.dtype | None, vocab_size: int | None) -> None:
        self._dtype = dtype
        self._vocab_size = vocab_size
        self._wrong = self._tokens = 0
        self._first: tuple[int, int] | None = None

    def pieces(self, binary: Path, sizes: list[int]) -> Iterator[HashedRange]:
        """Yield size and hash of pieces of these sizes, as far as the file goes, and of a rest."""
        with binary.open("rb") as stream:
            rest = binary.stat().st_size - sum(sizes)
            for size in [*sizes, rest] if rest > 0 or not sizes else sizes:
                digest, left = hashlib.sha256(), size
                while left and (block := stream.read(min(_BLOCK, left))):
                    digest.update(block)
                    self._look(block)
                    left -= len(block)
                yield HashedRange(size - left, digest.hexdigest())

    def _look(self, block: bytes) -> None:
        """Count tokens that are negative or not in the vocabulary."""
        if self._dtype is None:
            return
        whole = len(block) // self._dtype.itemsize
        tokens = np.frombuffer(block, self._dtype, whole)
        highest = np.iinfo(self._dtype).max if self._vocab_size is None else self._vocab_size - 1
        if len(tokens) and (tokens.min() < 0 or tokens.max() > highest):
            wrong = (tokens < 0) | (tokens > highest)
            if self._first is None:
                place = int(wrong.argmax())
                self._first = self._tokens + place, int(tokens[place])
            self._wrong += int(np.count_nonzero(wrong))
        self._tokens += len(tokens)

    def faults(self, binary: Path) -> Iterator[str]:
        """Tell of the tokens that cannot be."""
        if self._first is None:
            return
        place, token = self._first
        limit = "" if self._vocab_size is None else f" of {self._vocab_size:,} entries"
        yield (
            f"{binary}: {self._wrong:,} tokens are not in the vocabulary{limit}, the first is "
            f"token {place:,}: {token}; tokenize again with the tokenizer that the training uses"
        )
