"""Tool `repair`: a right index for a token file whose index is wrong, cut off or lost.

Pairs come from other programs; the repaired one can be merged, or trained on. Some versions of
Megatron leave the EOD token of --append-eod out of the lengths, or let pointers overflow int32.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from tokamake.errors import UserError

if TYPE_CHECKING:
    from tokamake.data.indexed.dataset import IndexWriter
    from tokamake.data.indexed.index_formats import IndexLayout

_CHUNK = 1 << 20
_NONE = np.zeros(0, np.int64)


class _Pair(NamedTuple):
    """A token file, and its index as far as it can be read."""

    prefix: Path
    binary: Path
    dtype: type[np.integer]
    tokens: int
    layout: "IndexLayout | None"
    eod: int


def repair(prefix: Path, /, *, eod: int, output: Path, dtype: str = "") -> None:
    """Make a right pair of one whose index does not fit its tokens.

    Mended are an index whose lengths omit the EOD token that each document ends with, and one whose
    byte pointers are wrong while its lengths are right. Where the index is missing or cut off,
    documents are cut after each EOD token, one sequence each. The token file is not changed: the
    new pair's is a hard link to it, or a copy on another disk.

    Args:
        prefix: the pair, named without .bin or .idx.
        eod: token that documents end with.
        output: prefix of the repaired pair.
        dtype: token type, where the index does not tell it: uint8, int8, int16, uint16, int32 or
            int64.

    Raises:
        UserError: the index is wrong in another way, or documents do not end with EOD.
    """
    from tokamake.data.indexed.dataset import IndexWriter
    from tokamake.data.indexed.document_sources import sources_path
    from tokamake.data.indexed.paths import bin_path, idx_path, manifest_path
    from tokamake.files import atomic

    pair = _open(prefix, eod, dtype)
    for path in (manifest_path(output), sources_path(output)):
        if path.exists():
            raise UserError(f"{path}: tells of another pair; remove it or name another --output")
    if idx_path(output).exists() and output.resolve() == prefix.resolve():
        raise UserError(f"{output}: is to be read and written; name another --output")
    with atomic(bin_path(output), idx_path(output)) as (bin_file, idx_file):
        with IndexWriter(idx_file, pair.dtype) as writer:
            finding = _write_index(pair, writer)
            writer.finish()
        _link(pair.binary, bin_file)
    print(f"{prefix}: {finding}")


def _open(prefix: Path, eod: int, dtype: str) -> _Pair:
    from tokamake.data.indexed.dataset import DTYPES
    from tokamake.data.indexed.paths import bin_path

    binary = bin_path(prefix)
    if not binary.is_file():
        raise UserError(f"{binary}: no such file; without its tokens a pair cannot be repaired")
    layout, reason = _layout(prefix)
    known = {kind.__name__: kind for kind in DTYPES.values()}
    stated = DTYPES[layout.code].__name__ if layout else dtype
    if not stated:
        raise UserError(f"{reason}; give the token type, such as --dtype uint16")
    if stated not in known:
        raise UserError(f"--dtype: {dtype}: no token type; give one of {', '.join(sorted(known))}")
    if dtype not in ("", stated):
        raise UserError(f"--dtype: {dtype}, but the index of {prefix} says {stated}; leave it out")
    chosen, size = known[stated], binary.stat().st_size
    limits = np.iinfo(chosen)
    if not limits.min <= eod <= limits.max:
        raise UserError(f"--eod: {eod}: no {stated}; give the token that ends documents")
    width = np.dtype(chosen).itemsize
    if size % width:
        raise UserError(
            f"{binary}: {size} bytes are no whole number of {stated} tokens; check --dtype, or "
            "make the pair again"
        )
    return _Pair(prefix, binary, chosen, size // width, layout, eod)


def _layout(prefix: Path) -> "tuple[IndexLayout | None, str]":
    """Columns of the index, or None and the reason why it cannot be read."""
    from tokamake.data.indexed.dataset import DTYPES
    from tokamake.data.indexed.index_formats import read_layout
    from tokamake.data.indexed.paths import idx_path

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


def _write_index(pair: _Pair, writer: "IndexWriter") -> str:
    """Write lengths and documents as they should be, and say what was wrong."""
    from tokamake.data.indexed.merge_inputs import check_bounds

    layout = pair.layout
    if layout is None:
        return _cut(pair, writer)
    check_bounds(pair.prefix, layout)
    missing = pair.tokens - layout.tokens()
    if not missing:
        return _follow(layout, np.dtype(pair.dtype).itemsize, writer)
    ends = sum(int(np.count_nonzero(counts)) for counts in _sequences_of(layout))
    if missing != ends:
        raise UserError(
            f"{pair.binary}: {pair.tokens:,} tokens, but the index counts "
            f"{pair.tokens - missing:,}; that is not one EOD token for each of {ends:,} documents; "
            "see that the file is whole, or remove the index to have documents cut at EOD tokens"
        )
    _lengthen(pair, layout, writer)
    return f"lengths omitted the EOD token of {ends:,} documents; each counts now"


def _sequences_of(layout: "IndexLayout") -> Iterator[npt.NDArray[np.int64]]:
    """Yield how many sequences documents have, so many documents at a time."""
    last = _NONE
    for bounds in layout.bounds.chunks():
        yield np.diff(bounds, prepend=last)
        last = bounds[-1:]


def _follow(layout: "IndexLayout", itemsize: int, writer: "IndexWriter") -> str:
    """Keep lengths that are right; pointers are computed from them anew."""
    end = wrong = 0
    for lengths, starts in zip(layout.lengths.chunks(), layout.starts.chunks(), strict=True):
        _refuse_negative(lengths, layout)
        ends = end + lengths.cumsum()
        wrong += int(np.count_nonzero((ends - lengths) * itemsize != starts))
        end = int(ends[-1])
        writer.add(lengths, _NONE)
    for counts in _sequences_of(layout):
        writer.add(_NONE, counts)
    if not wrong:
        return "healthy, nothing was to repair"
    return (
        f"{wrong:,} of {writer.sequences:,} byte pointers were wrong; they follow the lengths now"
    )


def _refuse_negative(lengths: npt.NDArray[np.int64], layout: "IndexLayout") -> None:
    if (lengths < 0).any():
        raise UserError(
            f"{layout.lengths.path}: a sequence has length {lengths.min()}; remove the index to "
            "have documents cut at EOD tokens"
        )


def _lengthen(pair: _Pair, layout: "IndexLayout", writer: "IndexWriter") -> None:
    """Let the last sequence of each document have the EOD token that follows it."""
    tokens = np.memmap(pair.binary, pair.dtype, "r")
    documents, start, step = layout.bounds.length - 1, 0, 1 << 14
    for first in range(0, documents, step):
        bounds = layout.bounds.read(first, min(step, documents - first) + 1)
        lengths = layout.lengths.read(int(bounds[0]), int(bounds[-1] - bounds[0]))
        _refuse_negative(lengths, layout)
        last = np.unique(bounds[bounds > bounds[0]]) - 1 - bounds[0]
        lengths[last] += 1
        ends = start + lengths.cumsum()
        found = tokens[ends[last] - 1] if len(last) else _NONE
        if (found != pair.eod).any():
            place = last[int((found != pair.eod).argmax())]
            document = first + int(np.searchsorted(bounds, bounds[0] + place, "right")) - 1
            raise UserError(
                f"{pair.binary}: document {document} should end at token {ends[place] - 1:,} with "
                f"EOD {pair.eod}, but {tokens[ends[place] - 1]} stands there; check --eod, or "
                "remove the index to have documents cut at EOD tokens"
            )
        writer.add(lengths, np.diff(bounds))
        start = int(ends[-1]) if len(ends) else start


def _cut(pair: _Pair, writer: "IndexWriter") -> str:
    """Let a document end after each EOD token."""
    first = end = 0
    with pair.binary.open("rb") as stream:
        while len(tokens := np.fromfile(stream, pair.dtype, _CHUNK)):
            ends = first + np.flatnonzero(tokens == pair.eod) + 1
            _add(pair, np.diff(ends, prepend=end), writer)
            end, first = int(ends[-1]) if len(ends) else end, first + len(tokens)
    if pair.tokens and not writer.documents:
        raise UserError(
            f"{pair.binary}: EOD {pair.eod} is not in it; check --eod and --dtype "
            f"({pair.dtype.__name__})"
        )
    rest = pair.tokens - end
    if rest:
        _add(pair, np.array([rest]), writer)
    told = f", the last one of {rest:,} tokens without EOD" if rest else ""
    what = "the index was missing or cut off"
    return f"{what}; {writer.documents:,} documents were cut at their EOD tokens{told}"


def _add(pair: _Pair, lengths: npt.NDArray[np.int64], writer: "IndexWriter") -> None:
    if (lengths >= 1 << 31).any():
        raise UserError(
            f"{pair.binary}: {lengths.max():,} tokens without EOD {pair.eod}, more than an index "
            "can count; check --eod and --dtype"
        )
    writer.add(lengths, np.ones(len(lengths), np.int32))


def _link(binary: Path, target: Path) -> None:
    """Make a hard link, or a copy where the file system has no link to give."""
    from tokamake.data.indexed.kernel_copy import copy

    target.unlink(missing_ok=True)
    try:
        target.hardlink_to(binary.resolve())
        return
    except OSError:
        pass
    with binary.open("rb", buffering=0) as source, target.open("wb", buffering=0) as stream:
        for _ in copy(source.fileno(), stream.fileno(), binary.stat().st_size):
            pass
