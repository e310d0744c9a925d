"""Passages of texts: lines, paragraphs or sequences of words that may repeat earlier ones.

Rows of files (`document_rows`) hold the passages of documents, in their order, and the spans that
are cut out.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokamake import _csrc
from tokamake.config.repeats import RepeatSettings
from tokamake.data.corpus.document_rows import HASH, read_shard_rows
from tokamake.data.filters._words import word_characters

_PLACE = [("document", "<u4"), ("text", "<u4"), ("begin", "<u4"), ("end", "<u4")]
CUT = np.dtype(_PLACE)
"""A span of a document: number of the document in its shard, number of its text (of several keys),
first character and end."""
PASSAGE = np.dtype([("hash", HASH), *_PLACE])

_SEPARATORS = {"lines": re.compile(r"\n"), "paragraphs": re.compile(r"\n\s*\n")}


class Passages(NamedTuple):
    """Passages of a text that are long enough."""

    hashes: npt.NDArray[np.uint64]
    """(passages,) hash of each."""
    spans: npt.NDArray[np.int64]
    """(passages, 2) first character and end."""


def make_finder(settings: RepeatSettings) -> Callable[[str], Passages]:
    """Return a function that finds the passages of a text."""
    if settings.unit == "words":
        group = settings.edge_words + 1
        windows = _csrc.WordWindows(
            word_characters(), size=settings.min_words - settings.edge_words, group=group
        )
        return lambda text: Passages(*windows.choose(text))
    separator, least = _SEPARATORS[settings.unit], settings.min_characters

    def find(text: str) -> Passages:
        spans = [span for span in _stripped(text, separator) if span[1] - span[0] >= least]
        hashes = b"".join(
            blake2b(text[begin:end].encode(), digest_size=8).digest() for begin, end in spans
        )
        return Passages(np.frombuffer(hashes, HASH), np.array(spans, np.int64).reshape(-1, 2))

    return find


def _stripped(text: str, separator: re.Pattern[str]) -> Iterator[tuple[int, int]]:
    """Yield the spans between separators, without the white space around them."""
    start = 0
    for end, following in [*(match.span() for match in separator.finditer(text)), (len(text), 0)]:
        piece = text[start:end].lstrip()
        begin = end - len(piece)
        yield begin, begin + len(piece.rstrip())
        start = following


def read_cuts(path: Path, shard: str) -> npt.NDArray[Any]:
    """(cuts,) spans of a shard, by document, text and character."""
    return read_shard_rows(path, shard, dtype=CUT)


def without(text: str, spans: Sequence[tuple[int, int]]) -> str:
    """Cut spans, ascending, out of a text.

    Of the white space before and after a cut, the part with more line feeds stays. A text without
    anything else becomes empty.
    """
    ends = [begin for begin, _ in spans[1:]] + [len(text)]
    first = text[: spans[0][0]]
    parts = [body] if (body := first.rstrip()) else []
    space = first[len(body) :]
    piece = ""
    for (_, start), end in zip(spans, ends, strict=True):
        piece = text[start:end]
        after = piece.lstrip()
        head = piece[: len(piece) - len(after)]
        space = _space(space, head) if parts else _indentation(head)
        if body := after.rstrip():
            parts += [space, body]
            space = after[len(body) :]
    if not parts:
        return ""
    return "".join([*parts, space if piece.strip() else piece])


def _space(before: str, after: str) -> str:
    """White space in place of a cut and of the white space around it."""
    if "\n" not in before and "\n" not in after:
        return max(before, after, key=len)
    if before.count("\n") <= after.count("\n"):
        return after
    return before[: before.rindex("\n") + 1] + _indentation(after) if "\n" in after else before


def _indentation(space: str) -> str:
    """White space after the last line feed; empty without a line feed."""
    return space[space.rfind("\n") + 1 :] if "\n" in space else ""
