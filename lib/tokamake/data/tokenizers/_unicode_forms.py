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
_POINTS = [
    *range(0xD800),
    *range(0xE000, 0x40000),
    *range(0xE0000, 0xE1000),
]  # others are unassigned
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
    characters = [*map(chr, _POINTS)]
    decomposed = _each("NFD", characters)
    marked = {last for text in decomposed for last in text[1:]}
    marked |= {c for c, text in zip(characters, _each(form, characters), strict=True) if c != text}
    pairs = [_HIGHEST_CLASS + character for character in characters if character != "\n"]
    marked |= {
        pair[1] for pair, text in zip(pairs, _each("NFD", pairs), strict=True) if pair != text
    }
    marks = np.zeros(0x110000, np.uint8)
    marks[[ord(character) for character in marked]] = 1
    return marks


def _each(form: str, texts: list[str]) -> list[str]:
    """Normalize each text; a line feed separates them, which no text changes."""
    texts = ["" if text == "\n" else text for text in texts]
    return [text or "\n" for text in _function(form)("\n".join(texts)).split("\n")]
