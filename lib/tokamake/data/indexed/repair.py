"""Tool `repair`: write a correct index for a token file with a wrong, truncated or missing index.

Such datasets come from other programs: some versions of Megatron leave the EOD token of
--append-eod out of the lengths, or let byte pointers overflow int32. You can merge the repaired
dataset or train on it.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokamake.data.indexed.dataset import DTYPES, IndexWriter
from tokamake.data.indexed.index_reader import IndexLayout, read_layout
from tokamake.data.indexed.kernel_copy import copy
from tokamake.data.indexed.merge_inputs import check_bounds
from tokamake.data.indexed.paths import bin_path, idx_path, manifest_path, sources_path
from tokamake.errors import UserError
from tokamake.files import atomic

_CHUNK = 1 << 20
_DOCUMENTS_AT_ONCE = 1 << 14
_NO_NUMBERS = np.zeros(0, np.int64)


class _BrokenDataset(NamedTuple):
    """A token file and its index, if the index is readable."""

    prefix: Path
    binary: Path
    dtype: type[np.integer]
    tokens: int
    layout: IndexLayout | None
    eod: int

    def split_at_eod(self) -> str:
        return (
            f"split the tokens at each EOD token: remove {idx_path(self.prefix)} and run `tokamake "
            f"repair {self.prefix} --eod {self.eod} --dtype {self.dtype.__name__} --output NEW`"
        )


def repair(prefix: Path, /, *, eod: int, output: Path, dtype: str = "") -> None:
    """Write a correct index for an indexed dataset whose index does not fit its tokens.

    `repair` fixes lengths that omit the EOD token at the end of each document, and byte pointers
    that are wrong while the lengths are right. If the index is missing or truncated, it splits the
    tokens into documents after each EOD token, with one sequence each. It does not change the token
    file: the new dataset gets a hard link to it, or a copy on another disk.

    Args:
        prefix: the dataset, without .bin or .idx.
        eod: end-of-document token.
        output: prefix of the repaired dataset.
        dtype: token type, if the index does not state it: uint8, int8, int16, uint16, int32 or
            int64.
    """
    dataset = _open(prefix, eod, dtype)
    # The repaired dataset gets no manifest, so an old one would not match it.
    for path in (manifest_path(output), sources_path(output)):
        if path.exists():
            raise UserError(
                f"{path}: belongs to another dataset; remove it or name another --output"
            )
    if idx_path(output).exists() and output.resolve() == prefix.resolve():
        raise UserError(f"{output}: is both input and output; name another --output")
    with atomic(bin_path(output), idx_path(output)) as (bin_file, idx_file):
        with IndexWriter(idx_file, dataset.dtype) as writer:
            result = _write_index(dataset, writer)
            writer.finish()
        _link(dataset.binary, bin_file)
    print(f"{prefix}: {result}")


def _open(prefix: Path, eod: int, dtype: str) -> _BrokenDataset:
    binary = bin_path(prefix)
    if not binary.is_file():
        raise UserError(f"{binary}: no such file; `repair` needs the tokens of the dataset")
    layout, reason = _readable_layout(prefix)
    token_type = _choose_dtype(prefix, layout, reason=reason, option=dtype)
    limits = np.iinfo(token_type)
    if not limits.min <= eod <= limits.max:
        raise UserError(
            f"--eod: {eod}: not a {token_type.__name__}; give the token that ends documents"
        )
    size, itemsize = binary.stat().st_size, np.dtype(token_type).itemsize
    if size % itemsize:
        raise UserError(
            f"{binary}: {size} bytes are not a whole number of {token_type.__name__} tokens; check "
            "--dtype, or rebuild the dataset"
        )
    return _BrokenDataset(prefix, binary, token_type, size // itemsize, layout, eod)


def _choose_dtype(
    prefix: Path, layout: IndexLayout | None, *, reason: str, option: str
) -> type[np.integer]:
    types = {dtype.__name__: dtype for dtype in DTYPES.values()}
    name = DTYPES[layout.code].__name__ if layout else option
    if not name:
        raise UserError(f"{reason}; give the token type, such as --dtype uint16")
    if name not in types:
        raise UserError(
            f"--dtype: {option}: not a token type; give one of {', '.join(sorted(types))}"
        )
    if option not in ("", name):
        raise UserError(f"--dtype: {option}, but the index of {prefix} says {name}; leave it out")
    return types[name]


def _readable_layout(prefix: Path) -> tuple[IndexLayout | None, str]:
    """Return the columns of the index, or None and the reason why it is unreadable."""
    idx = idx_path(prefix)
    if not idx.is_file():
        return None, f"{idx}: no such file"
    try:
        layout = read_layout(idx)
    except UserError as error:
        return None, str(error).partition(";")[0]
    if layout.in_tokens or layout.code in (6, 7):
        kind = "cached or lazy (TNTIDX)" if layout.in_tokens else "of floating-point tokens"
        raise UserError(f"{idx}: an index {kind}; `tokamake merge` reads it, not repair")
    if layout.code not in DTYPES:
        return None, f"{idx}: dtype code {layout.code} is not a known token format"
    return layout, ""


def _write_index(dataset: _BrokenDataset, writer: IndexWriter) -> str:
    """Write the correct index and return a sentence about the fault."""
    layout = dataset.layout
    if layout is None:
        return _split_at_eod(dataset, writer)
    check_bounds(dataset.prefix, layout)
    num_missing = dataset.tokens - layout.tokens()
    if not num_missing:
        return _fix_pointers(dataset, layout, writer=writer)
    # Documents without a sequence have no EOD token.
    num_eods = sum(int(np.count_nonzero(counts)) for counts in layout.sequence_counts())
    if num_missing != num_eods:
        raise UserError(
            f"{dataset.binary}: {dataset.tokens:,} tokens, but the index counts "
            f"{dataset.tokens - num_missing:,}; the difference is not one EOD token for each of "
            f"{num_eods:,} documents; check that the file is complete, or {dataset.split_at_eod()}"
        )
    _add_eods(dataset, layout, writer=writer)
    return f"lengths omitted the EOD token of {num_eods:,} documents; they include it now"


def _fix_pointers(dataset: _BrokenDataset, layout: IndexLayout, *, writer: IndexWriter) -> str:
    """Keep the lengths; the writer derives the pointers from them."""
    end, num_wrong, itemsize = 0, 0, np.dtype(dataset.dtype).itemsize
    for lengths, starts in zip(layout.lengths.chunks(), layout.starts.chunks(), strict=True):
        _refuse_negative(dataset, lengths)
        ends = end + lengths.cumsum()
        num_wrong += int(np.count_nonzero((ends - lengths) * itemsize != starts))
        end = int(ends[-1])
        writer.add(lengths, _NO_NUMBERS)
    for counts in layout.sequence_counts():
        writer.add(_NO_NUMBERS, counts)
    if not num_wrong:
        return "healthy, nothing to repair"
    return (
        f"{num_wrong:,} of {writer.sequences:,} byte pointers were wrong; they follow the lengths "
        "now"
    )


def _refuse_negative(dataset: _BrokenDataset, lengths: npt.NDArray[np.int64]) -> None:
    if (lengths < 0).any():
        raise UserError(
            f"{idx_path(dataset.prefix)}: a sequence has length {lengths.min()}; "
            f"{dataset.split_at_eod()}"
        )


def _add_eods(dataset: _BrokenDataset, layout: IndexLayout, *, writer: IndexWriter) -> None:
    """Lengthen the last sequence of each document by the EOD token that follows it."""
    tokens = np.memmap(dataset.binary, dataset.dtype, "r")
    num_documents, start = layout.bounds.length - 1, 0
    for first in range(0, num_documents, _DOCUMENTS_AT_ONCE):
        bounds = layout.bounds.read(first, min(_DOCUMENTS_AT_ONCE, num_documents - first) + 1)
        lengths = layout.lengths.read(int(bounds[0]), int(bounds[-1] - bounds[0]))
        _refuse_negative(dataset, lengths)
        # Last sequence of each document of the chunk; documents without sequences have none.
        last = np.unique(bounds[bounds > bounds[0]]) - 1 - bounds[0]
        lengths[last] += 1
        ends = start + lengths.cumsum()
        last_tokens = tokens[ends[last] - 1] if len(last) else _NO_NUMBERS
        if (last_tokens != dataset.eod).any():
            sequence = last[int((last_tokens != dataset.eod).argmax())]
            document = first + int(np.searchsorted(bounds, bounds[0] + sequence, "right")) - 1
            position = ends[sequence] - 1
            raise UserError(
                f"{dataset.binary}: document {document} should end at token {position:,} with EOD "
                f"{dataset.eod}, but that token is {tokens[position]}; check --eod, or "
                f"{dataset.split_at_eod()}"
            )
        writer.add(lengths, np.diff(bounds))
        start = int(ends[-1]) if len(ends) else start


def _split_at_eod(dataset: _BrokenDataset, writer: IndexWriter) -> str:
    """Write an index whose documents end after each EOD token."""
    first = end = 0
    with dataset.binary.open("rb") as stream:
        while len(tokens := np.fromfile(stream, dataset.dtype, _CHUNK)):
            ends = first + np.flatnonzero(tokens == dataset.eod) + 1
            _add_documents(dataset, np.diff(ends, prepend=end), writer=writer)
            end, first = int(ends[-1]) if len(ends) else end, first + len(tokens)
    if dataset.tokens and not writer.documents:
        raise UserError(
            f"{dataset.binary}: EOD {dataset.eod} is not in it; check --eod and --dtype "
            f"({dataset.dtype.__name__})"
        )
    remainder = dataset.tokens - end
    if remainder:
        _add_documents(dataset, np.array([remainder]), writer=writer)
    tail = f", the last one of {remainder:,} tokens without EOD" if remainder else ""
    return (
        f"the index was missing or truncated; {writer.documents:,} documents were split at their "
        f"EOD tokens{tail}"
    )


def _add_documents(
    dataset: _BrokenDataset, lengths: npt.NDArray[np.int64], *, writer: IndexWriter
) -> None:
    if (lengths >= 1 << 31).any():  # lengths are int32 in the index
        raise UserError(
            f"{dataset.binary}: {lengths.max():,} tokens without EOD {dataset.eod}, more than an "
            "index can count; check --eod and --dtype"
        )
    writer.add(lengths, np.ones(len(lengths), np.int32))


def _link(binary: Path, target: Path) -> None:
    target.unlink(missing_ok=True)
    try:
        target.hardlink_to(binary.resolve())
        return
    except OSError:
        pass  # another disk, or no hard links at all
    with binary.open("rb", buffering=0) as source, target.open("wb", buffering=0) as stream:
        for _ in copy(source.fileno(), stream.fileno(), binary.stat().st_size):
            pass
