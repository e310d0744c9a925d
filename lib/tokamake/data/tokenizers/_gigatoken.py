"""gigatoken behind a guard: restricts it to exact tokenizers and texts, and bounds its memory.

`tokenize.encoder` is the only caller. `_unicode_differences` has the checked versions and the code
points that gigatoken must not get.
"""

import ctypes
import os
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokamake._csrc import find_marked
from tokamake.data.tokenizers import Tokenizer, _unicode_differences
from tokamake.data.tokenizers._exactness import json_refusal, sentencepiece_refusal
from tokamake.data.tokenizers._sentencepiece_model import without_control_pieces
from tokamake.runtime.cores import set_malloc_options

_PART_CHARACTERS = 16_000_000  # encoded between two checks of the memory
_PART_TEXTS = 1 << 16  # per part: each text takes some memory, however short
_GROWTH_BYTES = 450_000_000  # growth of the process at which gigatoken's caches are dropped
_FILLER_MIB = 84  # makes gigatoken reserve room for about 780,000 words
_SEPARATOR = b"\0" + b"\n" * 4095


def refusal(tokenizer: Tokenizer) -> str:
    """Return why gigatoken may differ from the tokenizer's own package; empty if it cannot.

    The reason is a clause whose subject "it" is the tokenizer.
    """
    versions = _unicode_differences.VERSIONS
    if tokenizer.package == "sentencepiece":
        # Without normalization, sentencepiece handles all code points alike: no Unicode tables.
        return _version_refusal("gigatoken", versions["gigatoken"]) or sentencepiece_refusal(
            tokenizer.definition()
        )
    if tokenizer.package != "tokenizers":
        return "it is of another kind"
    reasons = (_version_refusal(package, number) for package, number in versions.items())
    return next(filter(None, reasons), "") or json_refusal(tokenizer.definition())


def _version_refusal(package: str, checked: str) -> str:
    try:
        installed = version(package)
    except PackageNotFoundError:
        return f"{package} is not installed"
    if installed == checked:
        return ""
    return (
        f"{package} {installed} is installed, but only {checked} is known to be exact: install "
        f"that, or write the output of `python -m {_unicode_differences.__name__}` into that module"
    )


class Gigatoken:
    """Encoder of gigatoken. Not for several threads at once."""

    package = "gigatoken"

    def __init__(self, tokenizer: Tokenizer, *, growth_bytes: int = _GROWTH_BYTES) -> None:
        """Load a tokenizer. Any exception means that gigatoken does not support it.

        Caches are dropped when the process's memory has grown by `growth_bytes`.
        """
        self._definition = tokenizer.definition()
        self._package = tokenizer.package
        self._growth_bytes = growth_bytes
        self._differences = _unicode_differences.table()
        self._load()
        self._first_resident = self._last_resident

    def _load(self) -> None:
        self._encoder: Any = None  # free the previous one before the next one takes memory
        _trim()
        self._encoder = _open(self._package, self._definition)
        self._last_resident = _resident_bytes()

    def unsafe(self, texts: Sequence[str]) -> NDArray[np.int64]:
        """Return the ascending indices of texts that gigatoken may encode differently."""
        return find_marked(list(texts), self._differences)

    def encode(self, texts: list[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """Return the concatenated token ids of all texts, and the number of tokens of each."""
        parts = [self._encode_part(part) for part in in_parts(texts, _PART_CHARACTERS)]
        if len(parts) == 1:
            return parts[0]
        empty = np.empty(0, np.uint32), np.empty(0, np.int64)
        ids, lengths = zip(empty, *parts, strict=True)
        return np.concatenate(ids), np.concatenate(lengths)

    def _encode_part(self, texts: list[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        resident = _resident_bytes()
        # The process may have grown for other reasons. Dropping the caches then frees nothing:
        # require some growth since they were dropped last, too.
        is_full = resident - self._first_resident > self._growth_bytes
        if is_full and resident - self._last_resident > self._growth_bytes // 4:
            self._load()
        return _unpack(self._encoder.encode_batch(texts, parallel=False))


def in_parts(texts: list[str], characters: int) -> Iterator[list[str]]:
    """Split a list into nonempty parts of at least `characters`, or of _PART_TEXTS texts."""
    start = size = 0
    for index, text in enumerate(texts):
        size += len(text)
        is_full = size >= characters or index + 1 - start == _PART_TEXTS
        if is_full or index + 1 == len(texts):
            yield texts[start : index + 1]
            start, size = index + 1, 0


def _open(package: str, definition: bytes) -> Any:
    import gigatoken

    if package == "sentencepiece":
        return gigatoken.Tokenizer.from_sentencepiece(without_control_pieces(definition))
    encoder = gigatoken.Tokenizer.from_json(definition)
    if isinstance(encoder.backend, gigatoken.gigatoken_rs.BPETokenizer):
        # gigatoken sizes its cache once, by the bytes of the first call. A cache that grows takes
        # time, and more memory the longer the input. The filler contains no document.
        filler = _SEPARATOR * ((1 << 20) // len(_SEPARATOR))
        source = gigatoken.BytesSource([filler] * _FILLER_MIB, separator=_SEPARATOR)
        encoder.encode_batch(source, parallel=False)
    return encoder


def _unpack(array: Any) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """Return the token ids and lengths in an awkward array."""
    ids, offsets = np.asarray(array.layout.content.data), np.asarray(array.layout.offsets.data)
    return ids[offsets[0] : offsets[-1]], np.diff(offsets)


def _resident_bytes() -> int:
    """Return the memory of this process, without pages that are mapped from files."""
    with open("/proc/self/statm", "rb") as file:
        _, resident, shared = map(int, file.read().split()[:3])
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def reuse_memory() -> None:
    """Make this process keep the memory that it frees, in one pool for all threads.

    The buffers of each batch then use the same pages. To get new pages from the kernel takes a
    tenth of the total time. Threads that already run keep their own pools. Allocation in many
    threads at once becomes slower.
    """
    # Unlike `keep_freed_memory`, for one large process: buffers above 32 MB go back to the kernel.
    set_malloc_options(arena_max=1, mmap_threshold=1 << 25, trim_threshold=1 << 28)


def _trim() -> None:
    """Return freed memory to the kernel. glibc does not do so by itself."""
    if hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)
