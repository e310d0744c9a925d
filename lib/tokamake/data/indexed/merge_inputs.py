"""The pairs that `merge` puts together: ours with their manifests, and those of other programs.

Each is checked before a byte is copied: sizes, pointers, document bounds, and what manifests say.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tokamake.data.indexed.dataset import DTYPES, token_dtype
from tokamake.data.indexed.float_tokens import highest
from tokamake.data.indexed.index_formats import IndexLayout, read_layout
from tokamake.data.indexed.manifest import read_manifest
from tokamake.data.indexed.paths import bin_path, file_path, idx_path, manifest_path
from tokamake.errors import UserError

ALIKE = (
    "tokenizer", "vocab_size", "eod", "bos", "append_eod", "prepend_bos", "split_sentences",
    "text_key", "template", "dtype",
)  # fmt: skip
"""What manifests must agree on, as far as they state it."""


class MergeInput(NamedTuple):
    """A checked pair."""

    prefix: Path
    """Its path without .bin or .idx."""
    stated: dict[str, Any] | None
    """Its manifest; None for a pair of another program."""
    layout: IndexLayout
    """Where the numbers of its index stand."""
    dtype: np.dtype
    """Type of the numbers in its .bin file."""
    tokens: int
    """How many there are."""

    @property
    def documents(self) -> int:
        """Documents in the index."""
        return self.layout.bounds.length - 1

    @property
    def sequences(self) -> int:
        """Sequences in the index."""
        return self.layout.lengths.length


def open_part(prefix: Path) -> MergeInput:
    """Open a pair and check its index and sizes; its hashes are compared when it is copied.

    Raises:
        UserError: a file is missing or damaged, or the files do not fit together.
    """
    stated = find_manifest(prefix)
    for fault in wrong_sizes(prefix, stated or {"bytes": {}}, ("bin", "idx", "sources")):
        raise UserError(fault)
    binary, idx = bin_path(prefix), idx_path(prefix)
    for path in (binary, idx):
        if not path.is_file():
            raise UserError(f"{path}: no such file; name pairs without .bin or .idx")
    layout = read_layout(idx)
    tokens, size = layout.tokens(), binary.stat().st_size
    dtype = _stored_dtype(idx, layout.code, tokens, size)
    check_size(prefix, tokens * dtype.itemsize)
    check_starts(prefix, layout, dtype.itemsize)
    check_bounds(prefix, layout)
    return MergeInput(prefix, stated, layout, dtype, tokens)


def find_manifest(prefix: Path) -> dict[str, Any] | None:
    """Manifest of a pair; pairs of other programs have none, and no map of sources either.

    Raises:
        UserError: one of ours has no whole manifest.
    """
    from tokamake.data.indexed.document_sources import sources_path

    ours = manifest_path(prefix).exists() or sources_path(prefix).exists()
    return read_manifest(prefix) if ours else None


def wrong_sizes(prefix: Path, stated: dict[str, Any], names: Iterable[str]) -> Iterator[str]:
    """Tell which of a pair's files, as far as its manifest states them, have another size."""
    for name in [name for name in names if name in stated["bytes"]]:
        path, size = file_path(prefix, name), stated["bytes"][name]
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            what = "is missing" if found is None else f"has {found} bytes"
            yield f"{path}: {what}, its manifest says {size}; remove the pair and run again"


def check_size(prefix: Path, expected: int) -> None:
    """Compare the size of a token file with what its index counts, in bytes.

    Raises:
        UserError: they differ.
    """
    binary = bin_path(prefix)
    if (size := binary.stat().st_size) != expected:
        raise UserError(
            f"{binary}: {size} bytes, but its index counts {expected}; {_remedy(prefix)}"
        )


def _stored_dtype(idx: Path, code: int, tokens: int, size: int) -> np.dtype:
    """Type of a code; 6 and 7 are float64 and float32 or the reverse, as the file's size tells."""
    if code in DTYPES:
        return np.dtype(DTYPES[code])
    if code not in (6, 7):
        raise UserError(f"{idx}: dtype code {code} is not a known token format; make it again")
    return np.dtype(np.float64 if tokens and size // tokens >= 8 else np.float32)


def check_starts(prefix: Path, layout: IndexLayout, itemsize: int) -> None:
    """Compare the start of each sequence with the sum of the lengths before it.

    Raises:
        UserError: a length or a start is wrong.
    """
    end, number = 0, 0
    unit = 1 if layout.in_tokens else itemsize
    for lengths, starts in zip(layout.lengths.chunks(), layout.starts.chunks(), strict=True):
        ends = end + lengths.cumsum()
        wrong = ((ends - lengths) * unit != starts) | (lengths < 0) | (lengths >= 1 << 31)
        if wrong.any():
            first = int(wrong.argmax())
            raise UserError(
                f"{layout.lengths.path}: sequence {number + first} begins at {starts[first]}, but "
                f"{(ends[first] - lengths[first]) * unit} follows from the lengths; "
                f"{_remedy(prefix)}"
            )
        end, number = int(ends[-1]), number + len(lengths)


def check_bounds(prefix: Path, layout: IndexLayout) -> None:
    """Check that document bounds ascend from 0 to the number of sequences.

    Raises:
        UserError: they do not.
    """
    last = 0
    for place, bounds in enumerate(layout.bounds.chunks()):
        if (place == 0 and bounds[0]) or bounds[0] < last or (np.diff(bounds) < 0).any():
            last = -1
            break
        last = int(bounds[-1])
    if last != layout.lengths.length or not layout.bounds.length:
        raise UserError(
            f"{layout.bounds.path}: document bounds do not ascend from 0 to "
            f"{layout.lengths.length}, the number of sequences; remove the index, then "
            f"{_remedy(prefix)} and --dtype"
        )


def _remedy(prefix: Path) -> str:
    return f"try `tokamake repair {prefix} --eod ID --output NEW`"


def check_alike(parts: list[MergeInput]) -> None:
    """Compare what the manifests state, and the token types.

    Raises:
        UserError: two pairs were not made alike.
    """
    first: dict[str, tuple[Any, Path]] = {}
    for part in parts:
        for key, value in _stated(part).items():
            known, prefix = first.setdefault(key, (value, part.prefix))
            if value != known:
                raise UserError(
                    f"{part.prefix}: {key} is {value}, but {known} in {prefix}; tokenize both alike"
                )


def _stated(part: MergeInput) -> dict[str, Any]:
    """What is known of how a pair was made; floating-point tokens will take the others' type."""
    known = {} if part.dtype.kind == "f" else {"dtype": part.dtype.name}
    return known | {key: value for key, value in (part.stated or {}).items() if key in ALIKE}


def common_dtype(parts: Iterable[MergeInput]) -> type[np.integer]:
    """Token type of the merged pair, once for all: that of the parts that hold integers.

    Where all hold floating-point numbers it is uint16 or int32, by the highest token.

    Raises:
        UserError: a token is no whole number, or does not fit in the type.
    """
    parts = list(parts)
    whole = [part.dtype.type for part in parts if part.dtype.kind != "f"]
    floats = [part for part in parts if part.dtype.kind == "f"]
    highests = {part.prefix: highest(bin_path(part.prefix), part.dtype) for part in floats}
    chosen = whole[0] if whole else token_dtype(max(highests.values(), default=0) + 1)
    for prefix, token in highests.items():
        if token > np.iinfo(chosen).max:
            raise UserError(
                f"{bin_path(prefix)}: token {token} does not fit in {np.dtype(chosen).name}, "
                "the type of the other pairs; tokenize all alike"
            )
    return chosen
