"""Texts to sentences, for data whose sequences are sentences (BERT, T5, ICT).

Boundaries are those of the sentencex package (Wikimedia), which has rules and abbreviations of many
languages inside; white space around a sentence belongs to none.
"""

import re
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from tokamake.data.tokenizers import failure

_PARAGRAPH_BREAK = re.compile(r"\n\r*\n")  # what sentencex itself splits at first
# sentencex mixes up bytes and characters at white space that takes several bytes, and panics.
_PLAIN = dict.fromkeys(
    [0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000], " "
)
# The time of sentencex grows with the square of what it sees at once.
_LONGEST = 16_000  # characters seen at once; a sentence is cut that has no boundary in so many
_WINDOW = 4_000  # the same at first for text with few spaces, where it takes the longest


def split(texts: list[str], language: str) -> tuple[list[str], npt.NDArray[np.int64]]:
    """Split texts into sentences.

    Args:
        texts: documents.
        language: ISO 639 code; a language that sentencex has no rules for takes those of the
            nearest one that it has, at last English.

    Returns:
        Sentences of all texts, one after the other, and (texts,) how many each text has.
    """
    sentences: list[str] = []
    counts = np.empty(len(texts), np.int64)
    for index, text in enumerate(texts):
        before = len(sentences)
        for paragraph in _PARAGRAPH_BREAK.split(text):
            sentences += _of_paragraph(paragraph, language)
        counts[index] = len(sentences) - before
    return sentences, counts


def _of_paragraph(paragraph: str, language: str) -> Iterator[str]:
    plain = paragraph if paragraph.isascii() else paragraph.translate(_PLAIN)
    start = 0
    while start < len(paragraph):
        for length in _next_lengths(plain, start, language):
            if sentence := paragraph[start : start + length].strip():
                yield sentence
            start += length


def _next_lengths(plain: str, start: int, language: str) -> list[int]:
    """Lengths of some sentences from `start` on, all of which end well before what is looked at."""
    spaces = plain.count(" ", start, start + _WINDOW)
    size = _LONGEST if spaces > _WINDOW // 40 else _WINDOW
    while True:
        window = plain[start : start + size]
        lengths = _lengths(window, language)
        if start + size >= len(plain):
            return lengths
        # What follows can change the last boundaries: a quotation mark may have its partner there.
        sure = int(np.searchsorted(np.cumsum(lengths), size * 3 // 4, side="right"))
        if sure:
            return lengths[:sure]
        if size >= _LONGEST:
            return [max(window.rfind(space) for space in " \t\n") + 1 or size]
        size *= 2


def _lengths(text: str, language: str) -> list[int]:
    """Lengths of the sentences of a text, which is one sentence if sentencex fails at it."""
    import sentencex

    try:
        parts = sentencex.segment(language, text)
    except BaseException as error:
        failure(error)  # lets pass what is not a panic
        return [len(text)]
    return [len(part) for part in parts] if "".join(parts) == text else [len(text)]
