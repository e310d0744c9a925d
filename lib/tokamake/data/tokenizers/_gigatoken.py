"""gigatoken behind a guard: where it may be used, which texts it must not get, its memory bounded.

`encode.Encoder` is the only caller. Checked tables and versions are in `_code_points`.
"""

import ctypes
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokamake._csrc import find_marked
from tokamake.data.tokenizers import Tokenizer
from tokamake.data.tokenizers import _unicode_differences as code_points
from tokamake.data.tokenizers._exactness import json_refusal, sentencepiece_refusal
from tokamake.data.tokenizers._sentencepiece_model import without_control_pieces
from tokamake.runtime.cores import set_malloc_options

_PART = 16_000_000  # characters encoded between two looks at the memory, at most about
_TEXTS = 1 << 16  # texts of a part at most: however short, each takes some memory
_BUDGET = 450_000_000  # bytes that the process may grow by until gigatoken's caches are thrown away
_ROOM_FOR = 84  # MiB of text for whose words, about 780,000, a cache has room from the beginning
_SEPARATOR = b"\0" + b"\n" * 4095


def refusal(tokenizer: Tokenizer) -> str:
    """Why gigatoken cannot stand in for a tokenizer's own package, in one clause; empty: it can."""
    wanted = code_points.VERSIONS
    if tokenizer.package == "sentencepiece":  # which treats all of Unicode alike where we use it
        return _version_refusal("gigatoken", wanted["gigatoken"]) or sentencepiece_refusal(
            tokenizer.definition()
        )
    if tokenizer.package != "tokenizers":
        return "it is of another kind"
    reasons = (_version_refusal(package, number) for package, number in wanted.items())
    return next(filter(None, reasons), "") or json_refusal(tokenizer.definition())


def _version_refusal(package: str, wanted: str) -> str:
    try:
        installed = version(package)
    except PackageNotFoundError:
        return f"{package} is not installed"
    if installed == wanted:
        return ""
    return (
        f"{package} {installed} is installed, and what is exact is known for {wanted}: install "
        f"that, or write what `python -m {code_points.__name__}` prints into that module"
    )


class Gigatoken:
    """A tokenizer loaded by gigatoken, for one thread."""

    package = "gigatoken"

    def __init__(self, tokenizer: Tokenizer, *, budget: int = _BUDGET) -> None:
        """Load it; any exception means that gigatoken does not know such a tokenizer.

        Args:
            tokenizer: one that `refusal` says nothing against.
            budget: bytes that the process may grow by until the caches are thrown away.
        """
        self._definition = tokenizer.definition()
        self._package = tokenizer.package
        self._budget = budget
        self._table = code_points.table()
        self._load()
        self._first = self._latest

    def _load(self) -> None:
        self._loaded: Any = None  # let go of the earlier one first
        _trim()
        self._loaded = _open(self._package, self._definition)
        self._latest = _resident_bytes()

    def unsafe(self, texts: Sequence[str]) -> NDArray[np.int64]:
        """Numbers of the texts that gigatoken may encode differently, ascending."""
        return find_marked(list(texts), self._table)

    def encode(self, texts: list[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """Token ids of all texts one after the other, and how many each has."""
        parts = [self._encode_part(part) for part in in_parts(texts, _PART)]
        if len(parts) == 1:
            return parts[0]
        none = np.empty(0, np.uint32), np.empty(0, np.int64)
        ids, lengths = zip(none, *parts, strict=True)
        return np.concatenate(ids), np.concatenate(lengths)

    def _encode_part(self, texts: list[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        resident = _resident_bytes()
        # What others hold cannot be thrown away here: look whether the caches can have grown, too.
        full = resident - self._first > self._budget
        if full and resident - self._latest > self._budget // 4:
            self._load()
        found = self._loaded.encode_batch(texts, parallel=False)
        return found if isinstance(found, tuple) else _unpacked(found)


def in_parts(texts: list[str], characters: int) -> Iterator[list[str]]:
    """Cut a list where at least so many characters, or _TEXTS, have come; no part is empty."""
    start = size = 0
    for number, text in enumerate(texts):
        size += len(text)
        full = size >= characters or number + 1 - start == _TEXTS
        if full or number + 1 == len(texts):
            yield texts[start : number + 1]
            start, size = number + 1, 0


def _open(package: str, definition: bytes) -> Any:
    import gigatoken

    if "awkward" not in sys.modules:
        sys.modules["awkward"] = _stand_in()
    if package == "sentencepiece":
        return gigatoken.Tokenizer.from_sentencepiece(without_control_pieces(definition))
    opened = gigatoken.Tokenizer.from_json(definition)
    if isinstance(opened.backend, gigatoken.gigatoken_rs.BPETokenizer):
        # The bytes of the first call tell how many words to make room for, once and for all: to
        # grow takes time, and more memory the longer the input. These bytes hold no document.
        filler = _SEPARATOR * ((1 << 20) // len(_SEPARATOR))
        first = gigatoken.BytesSource([filler] * _ROOM_FOR, separator=_SEPARATOR)
        opened.encode_batch(first, parallel=False)
    return opened


def _stand_in() -> ModuleType:
    """A module for gigatoken, which only packs its two arrays with awkward.

    To import awkward takes a quarter of a second and 50 MB.
    """
    module = ModuleType("awkward", "Hands over arrays as they are.")
    vars(module).update(Array=type("Array", (), {}), unflatten=lambda *arrays: arrays)
    return module


def _unpacked(array: Any) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """What the real awkward makes of them, if somebody else has imported it."""
    ids, offsets = np.asarray(array.layout.content.data), np.asarray(array.layout.offsets.data)
    return ids[offsets[0] : offsets[-1]], np.diff(offsets)


def _resident_bytes() -> int:
    """Memory of this process, without what it only maps from files."""
    with open("/proc/self/statm", "rb") as file:
        _, resident, shared = map(int, file.read().split()[:3])
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def reuse_memory() -> None:
    """Have this process keep the memory that it frees, in one pool for all threads.

    Buffers of a batch are then the same pages again and again; to get them anew from the system
    each time takes a tenth of all the time. Threads that have run before keep their own pools, and
    whoever allocates in many threads at once is slower.
    """
    set_malloc_options(arena_max=1, mmap_threshold=1 << 25, trim_threshold=1 << 28)


def _trim() -> None:
    """Give freed memory back to the system, which glibc does not do by itself."""
    if hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)
