"""Inputs of `merge`: indexed datasets of tokamake with their manifests, or of other programs.

`merge` checks all inputs before it copies a byte. `describe` and `repair` use the same checks.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokamake.data.indexed.dataset import DTYPES, index_remedy, token_dtype
from tokamake.data.indexed.index_reader import IndexLayout, read_layout
from tokamake.data.indexed.manifest import find_manifest
from tokamake.data.indexed.paths import bin_path, file_path, idx_path
from tokamake.data.readers import natural_key
from tokamake.errors import UserError

_CHUNK = 1 << 20

SHARED_KEYS = (
    "tokenizer", "vocab_size", "eod", "bos", "append_eod", "prepend_bos", "split_sentences",
    "special_tokens_in_text", "dtype",
)  # fmt: skip
"""Manifest keys whose values must be the same in all inputs that state them."""


class MergeInput(NamedTuple):
    """An indexed dataset that passed its checks."""

    prefix: Path
    manifest: dict[str, Any] | None
    """None for a dataset of another program."""
    layout: IndexLayout
    dtype: np.dtype
    """Type of the numbers in its .bin file; may be floating-point."""
    tokens: int

    @property
    def documents(self) -> int:
        return self.layout.bounds.length - 1

    @property
    def sequences(self) -> int:
        return self.layout.lengths.length


def expand_prefixes(names: list[Path]) -> list[Path]:
    """Return the prefixes that names stand for, in the order of the names.

    A name is a prefix, also with .bin or .idx at the end, or a folder: all its datasets in natural
    order, 2 before 10.
    """
    prefixes: list[Path] = []
    for name in names:
        if name.is_dir() and not idx_path(name).exists():
            prefixes += _datasets_in(name)
        elif name.suffix in (".bin", ".idx") and not bin_path(name).exists():
            prefixes.append(name.with_suffix(""))
        else:
            prefixes.append(name)
    return prefixes


def _datasets_in(folder: Path) -> list[Path]:
    prefixes = {
        path.with_suffix("")
        for path in folder.iterdir()
        # Names with a leading dot are temporary files of a running job.
        if path.suffix in (".bin", ".idx") and not path.name.startswith(".")
    }
    for prefix in prefixes:
        for path in (bin_path(prefix), idx_path(prefix)):
            if not path.is_file():
                raise UserError(
                    f"{path}: no such file, but the other file of the dataset exists; rebuild or "
                    "remove the dataset"
                )
    if not prefixes:
        raise UserError(f"{folder}: no dataset in this folder; name another folder, or prefixes")
    return sorted(prefixes, key=lambda prefix: natural_key(prefix.name))


def open_merge_input(prefix: Path, *, index_at_once: bool = False) -> MergeInput:
    """Open a dataset and check its index and sizes; `concatenate` compares the hashes later."""
    manifest = find_manifest(prefix)
    for fault in size_faults(prefix, manifest or {"bytes": {}}, names=("bin", "idx", "sources")):
        raise UserError(fault)
    binary, idx = bin_path(prefix), idx_path(prefix)
    for path in (binary, idx):
        if not path.is_file():
            raise UserError(f"{path}: no such file; name datasets without .bin or .idx")
    layout = read_layout(idx, at_once=index_at_once)
    tokens, size = layout.tokens(), binary.stat().st_size
    dtype = _stored_dtype(idx, layout.code, tokens=tokens, size=size)
    check_size(prefix, tokens * dtype.itemsize)
    check_sequence_starts(prefix, layout, itemsize=dtype.itemsize)
    check_bounds(prefix, layout)
    return MergeInput(prefix, manifest, layout, dtype, tokens)


def size_faults(prefix: Path, manifest: dict[str, Any], *, names: Iterable[str]) -> Iterator[str]:
    """Yield a message for each file whose size differs from the manifest."""
    for name in [name for name in names if name in manifest["bytes"]]:
        path, expected = file_path(prefix, name), manifest["bytes"][name]
        size = path.stat().st_size if path.is_file() else None
        if size != expected:
            state = "is missing" if size is None else f"has {size} bytes"
            yield f"{path}: {state}, its manifest says {expected}; remove the dataset and rerun"


def check_size(prefix: Path, expected: int) -> None:
    """Compare the size of a token file with the size that its index counts, in bytes."""
    binary = bin_path(prefix)
    if (size := binary.stat().st_size) != expected:
        raise UserError(
            f"{binary}: {size} bytes, but its index counts {expected}; {_remedy(prefix)}"
        )


def _stored_dtype(idx: Path, code: int, *, tokens: int, size: int) -> np.dtype:
    """Return the token type of a dtype code.

    Lineages of Megatron disagree whether 6 is float64 and 7 float32 or the reverse. The size of
    the .bin file decides.
    """
    if code in DTYPES:
        return np.dtype(DTYPES[code])
    if code not in (6, 7):
        raise UserError(
            f"{idx}: dtype code {code} is not a known token format; rebuild the dataset"
        )
    return np.dtype(np.float64 if tokens and size // tokens >= 8 else np.float32)


def check_sequence_starts(prefix: Path, layout: IndexLayout, *, itemsize: int) -> None:
    """Compare the start of each sequence with the sum of the lengths before it."""
    end, number = 0, 0
    unit = 1 if layout.in_tokens else itemsize
    for lengths, starts in zip(layout.lengths.chunks(), layout.starts.chunks(), strict=True):
        ends = end + lengths.cumsum()
        wrong = ((ends - lengths) * unit != starts) | (lengths < 0) | (lengths >= 1 << 31)
        if wrong.any():
            first = int(wrong.argmax())
            if not 0 <= lengths[first] < 1 << 31:
                raise UserError(
                    f"{layout.lengths.path}: sequence {number + first} has length "
                    f"{lengths[first]}; {index_remedy(layout.lengths.path)}"
                )
            raise UserError(
                f"{layout.lengths.path}: sequence {number + first} begins at {starts[first]}, but "
                f"{(ends[first] - lengths[first]) * unit} follows from the lengths; "
                f"{_remedy(prefix)}"
            )
        end, number = int(ends[-1]), number + len(lengths)


def check_bounds(prefix: Path, layout: IndexLayout) -> None:
    """Check that document bounds ascend from 0 to the number of sequences."""
    last = 0
    for chunk, bounds in enumerate(layout.bounds.chunks()):
        if (chunk == 0 and bounds[0]) or bounds[0] < last or (bounds[1:] < bounds[:-1]).any():
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


def check_consistent(inputs: list[MergeInput]) -> None:
    """Compare the shared keys of the manifests, and the token types."""
    first: dict[str, tuple[Any, Path]] = {}
    for dataset in inputs:
        for key, value in _shared_values(dataset).items():
            expected, prefix = first.setdefault(key, (value, dataset.prefix))
            if value != expected:
                raise UserError(
                    f"{dataset.prefix}: {key} is {value}, but {expected} in {prefix}; tokenize "
                    "both with the same settings"
                )


def _shared_values(dataset: MergeInput) -> dict[str, Any]:
    # Floating-point tokens are converted to the type of the other inputs.
    dtype = {} if dataset.dtype.kind == "f" else {"dtype": dataset.dtype.name}
    # Manifests of earlier versions do not state it.
    manifest = {"special_tokens_in_text": "special", **dataset.manifest} if dataset.manifest else {}
    return dtype | {key: value for key, value in manifest.items() if key in SHARED_KEYS}


def common_dtype(inputs: Iterable[MergeInput]) -> type[np.integer]:
    """Return the token type of the merged dataset: the type of the inputs with integers.

    If all inputs have floating-point tokens, the highest token decides between uint16 and int32.
    """
    inputs = list(inputs)
    integer_types = [dataset.dtype.type for dataset in inputs if dataset.dtype.kind != "f"]
    highest = {
        dataset.prefix: highest_token(bin_path(dataset.prefix), dataset.dtype)
        for dataset in inputs
        if dataset.dtype.kind == "f"
    }
    dtype = integer_types[0] if integer_types else token_dtype(max(highest.values(), default=0) + 1)
    for prefix, token in highest.items():
        if token > np.iinfo(dtype).max:
            raise UserError(
                f"{bin_path(prefix)}: token {token} does not fit in {np.dtype(dtype).name}, the "
                "token type of the other datasets; tokenize all with the same settings"
            )
    return dtype


def highest_token(binary: Path, dtype: np.dtype) -> int:
    """Return the highest token, -1 if there is none; refuse numbers that are no int32 above -1."""
    highest, first = -1, 0
    for tokens in _chunks(binary, dtype):
        # NaN and infinity fail these comparisons too.
        invalid = ~((tokens >= 0) & (tokens < 1 << 31) & (tokens == np.floor(tokens)))
        if invalid.any():
            position = int(invalid.argmax())
            raise UserError(
                f"{binary}: number {first + position} is {tokens[position]}, not a token; the "
                "file holds no tokens, leave it out"
            )
        highest, first = max(highest, int(tokens.max())), first + len(tokens)
    return highest


def as_integers(
    binary: Path, dtype: np.dtype, *, target_dtype: type[np.integer]
) -> Iterator[npt.NDArray[np.integer]]:
    """Yield the tokens of a file as integers; call `highest_token` first to check them."""
    for tokens in _chunks(binary, dtype):
        yield tokens.astype(target_dtype)


def _chunks(binary: Path, dtype: np.dtype) -> Iterator[npt.NDArray[np.floating]]:
    with binary.open("rb") as stream:
        while len(tokens := np.fromfile(stream, dtype, _CHUNK)):
            yield tokens
