"""Unicode normalization of a tokenizer, limited to the few characters that it can change.

The installed package `tokenizers` normalizes, so its Unicode version does not matter. Characters
are marked if it changes them, reorders them, or composes them with one before. Marked characters
with the one before them are a cluster; the rest of a text is normalized already.
"""

from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import NDArray

from tokamake.data.tokenizers._exactness import Json, Unsupported

Normalize = Callable[[str], str]
_FORMS = ("NFC", "NFD", "NFKC", "NFKD")
_POINTS = np.r_[0:0xD800, 0xE000:0x40000, 0xE0000:0xE1000]  # others are unassigned
_CHARACTERS = [chr(point) for point in _POINTS if point != ord("\n")]
_CHUNK = 512  # characters that are normalized at once
_HIGHEST_CLASS = "\u0345"  # of marks, by which they are ordered


def marks_and_function(normalizer: Json | None) -> tuple[NDArray[np.uint8], Normalize]:
    """(0x110000,) marked characters, empty if there are none, and the function that normalizes.

    Unsupported if the normalizer does more than to choose a form of Unicode.
    """
    steps = [normalizer] if normalizer else []
    while any(step["type"] == "Sequence" for step in steps):
        steps = [part for step in steps for part in step.get("normalizers", [step])]
    if not steps:
        return np.empty(0, np.uint8), str
    (form, *others) = {step["type"] for step in steps}
    if others or form not in _FORMS:
        raise Unsupported(f"its normalizer is {', '.join(sorted({form, *others}))}")
    return _marks(form), _function(form)


def _function(form: str) -> Normalize:
    from tokenizers import normalizers

    normalize: Normalize = getattr(normalizers, form)().normalize_str
    return normalize


@cache
def _marks(form: str) -> NDArray[np.uint8]:
    marked = {*_changed(form, _CHARACTERS)}
    marked |= {last for text in _changed("NFD", _CHARACTERS).values() for last in text[1:]}
    pairs = [_HIGHEST_CLASS + character for character in _CHARACTERS]
    marked |= {pair[1] for pair in _changed("NFD", pairs)}
    marks = np.zeros(0x110000, np.uint8)
    marks[[ord(character) for character in marked]] = 1
    return marks


def _changed(form: str, texts: list[str]) -> dict[str, str]:
    """Normal forms of the texts that are not normalized."""
    normalize = _function(form)
    changed: dict[str, str] = {}
    for start in range(0, len(texts), _CHUNK):
        lines = "\n".join(texts[start : start + _CHUNK])  # no text changes a line feed
        if (normalized := normalize(lines)) != lines:
            pairs = zip(lines.split("\n"), normalized.split("\n"), strict=True)
            changed |= {text: form for text, form in pairs if text != form}
    return changed
