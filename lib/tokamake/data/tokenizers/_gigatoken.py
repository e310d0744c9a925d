"""gigatoken behind a guard: where it may be used, which texts it must not get, its memory bounded.

`encode.Encoder` is the only caller. Checked tables and versions are in `_code_points`.
"""

import ctypes
import os
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokamake._csrc import find_marked
from tokamake.data.tokenizers import Tokenizer
from tokamake.data.tokenizers import _code_points as code_points
from tokamake.data.tokenizers._exact import json_refusal, sentencepiece_refusal
from tokamake.data.tokenizers._sentencepiece_model import without_control_pieces

_PART = 16_000_000  # characters encoded between two looks at the memory, at most about
_TEXTS = 1 << 16  # texts of a part at most: however short, each takes some memory
_BUDGET = 450_000_000  # bytes that the process may grow by until gigatoken's caches are thrown away
_TRIMMING = 24_000_000  # characters after which freed memory goes back to the system


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
        self._characters = 0

    def unsafe(self, texts: list[str]) -> NDArray[np.int64]:
        """Numbers of the texts that gigatoken may encode differently, ascending."""
        return find_marked(texts, self._table)

    def encode(self, texts: list[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """Token ids of all texts one after the other, and how many each has."""
        parts = [self._encode_part(part) for part in in_parts(texts, _PART)]
        if len(parts) == 1:
            return parts[0]
        none = np.empty(0, np.uint32), np.empty(0, np.int64)
        ids, lengths = zip(none, *parts, strict=True)
        return np.concatenate(ids), np.concatenate(lengths)

    def _encode_part(self, texts: list[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        size = sum(map(len, texts))
        if (self._characters + size) // _TRIMMING > self._characters // _TRIMMING:
            _trim()
        self._characters += size
        resident = _resident_bytes()
        # What others hold cannot be thrown away here: look whether the caches can have grown, too.
        full = resident - self._first > self._budget
        if full and resident - self._latest > self._budget // 4:
            self._load()
        layout = self._loaded.encode_batch(texts, parallel=False).layout
        ids, offsets = np.asarray(layout.content.data), np.asarray(layout.offsets.data)
        return ids[offsets[0] : offsets[-1]], np.diff(offsets)


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

    if package == "sentencepiece":
        return gigatoken.Tokenizer.from_sentencepiece(without_control_pieces(definition))
    return gigatoken.Tokenizer.from_json(definition)


def _resident_bytes() -> int:
    """Memory of this process, without what it only maps from files."""
    with open("/proc/self/statm", "rb") as file:
        _, resident, shared = map(int, file.read().split()[:3])
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def _trim() -> None:
    """Give freed memory back to the system, which glibc does not do by itself."""
    if hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)
