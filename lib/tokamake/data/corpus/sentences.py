"""Split texts into sentences, for models whose sequences are sentences (BERT, T5, ICT).

The sentencex package (Wikimedia) finds the boundaries; it has rules and abbreviations of many
languages. White space around a sentence is dropped.
"""

import re
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from tokamake.data.tokenizers import failure

_PARAGRAPH_BREAK = re.compile(r"\n\r*\n")  # sentencex splits here first, too
# sentencex panics at white space of several bytes, because it confuses bytes and characters.
_TO_SPACE = dict.fromkeys(
    [0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000], " "
)
# The time of sentencex grows with the square of the text length, so it gets a window of text.
_LONGEST = 16_000  # characters; a sentence without a boundary in this many is cut
_WINDOW = 4_000  # first window for text with few spaces, for which sentencex is slowest


def split(texts: list[str], language: str) -> tuple[list[str], npt.NDArray[np.int64]]:
    """Split texts into sentences.

    Args:
        language: ISO 639 code. If sentencex has no rules for a language, it uses the rules of a
            related language or English.

    Returns:
        Sentences of all texts in order, and (texts,) number of sentences of each text.
    """
    sentences: list[str] = []
    counts = np.empty(len(texts), np.int64)
    for index, text in enumerate(texts):
        num_before = len(sentences)
        for paragraph in _PARAGRAPH_BREAK.split(text):
            sentences += _split_paragraph(paragraph, language)
        counts[index] = len(sentences) - num_before
    return sentences, counts


def _split_paragraph(paragraph: str, language: str) -> Iterator[str]:
    plain = paragraph if paragraph.isascii() else paragraph.translate(_TO_SPACE)
    start = 0
    while start < len(paragraph):
        for length in _next_lengths(plain, start, language=language):
            if sentence := paragraph[start : start + length].strip():
                yield sentence
            start += length


def _next_lengths(plain: str, start: int, *, language: str) -> list[int]:
    """Return the lengths of some sentences from `start` on, with white space around them.

    They end well before the end of the window, where boundaries are uncertain.
    """
    spaces = plain.count(" ", start, start + _WINDOW)
    size = _LONGEST if spaces > _WINDOW // 40 else _WINDOW
    while True:
        window = plain[start : start + size]
        lengths = _sentence_lengths(window, language)
        if start + size >= len(plain):
            return lengths
        # The text after the window can change the last boundaries: it may close a quotation.
        num_certain = int(np.searchsorted(np.cumsum(lengths), size * 3 // 4, side="right"))
        if num_certain:
            return lengths[:num_certain]
        if size >= _LONGEST:
            return [max(window.rfind(space) for space in " \t\n") + 1 or size]
        size *= 2


def _sentence_lengths(text: str, language: str) -> list[int]:
    """Return the lengths of the sentences of a text; one sentence if sentencex fails."""
    import sentencex

    try:
        parts = sentencex.segment(language, text)
    except BaseException as error:  # a panic in Rust is no Exception
        failure(error)  # raises other errors again, such as KeyboardInterrupt
        return [len(text)]
    # Lengths are offsets into the original text, so no character may be lost.
    return [len(part) for part in parts] if "".join(parts) == text else [len(text)]
