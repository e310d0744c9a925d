"""Filter `gopher_repetition`: drop documents that repeat lines, paragraphs or sequences of words.

Rules of Gopher (Rae et al., 2021, https://arxiv.org/abs/2112.11446, table A1), with the defaults
and the order of datatrove 0.10.1 (pipeline/filters/gopher_repetition_filter.py, Apache-2.0). Shares
of characters divide by all characters of the document.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from tokamake.data.filters import Document, DocumentFilter, Drop, out_of_bounds
from tokamake.data.filters._characters import statistics

if TYPE_CHECKING:
    from tokamake._csrc import Repetition

Share = Annotated[float, Field(ge=0, le=1)] | None


class Filter(DocumentFilter):
    """Drop documents with too much repetition; null switches a rule off."""

    max_duplicate_paragraphs: Share = 0.3
    """Maximum share of paragraphs that an earlier one equals. Blank lines separate them."""
    max_duplicate_paragraph_characters: Share = 0.2
    """Maximum share of characters in these paragraphs."""
    max_duplicate_lines: Share = 0.3
    """Maximum share of lines that an earlier one equals."""
    max_duplicate_line_characters: Share = 0.2
    """Maximum share of characters in these lines."""
    max_top_2_gram: Share = 0.2
    """Maximum share of characters in all copies of the most frequent 2 successive words."""
    max_top_3_gram: Share = 0.18
    """The same for 3 words."""
    max_top_4_gram: Share = 0.16
    """The same for 4 words."""
    max_duplicate_5_grams: Share = 0.15
    """Maximum share of characters in 5 successive words that occurred before."""
    max_duplicate_6_grams: Share = 0.14
    """The same for 6 words."""
    max_duplicate_7_grams: Share = 0.13
    """The same for 7 words."""
    max_duplicate_8_grams: Share = 0.12
    """The same for 8 words."""
    max_duplicate_9_grams: Share = 0.11
    """The same for 9 words."""
    max_duplicate_10_grams: Share = 0.1
    """The same for 10 words."""

    def setup(self) -> None:
        """Load the table of characters."""
        statistics()

    def apply(self, document: Document) -> Drop | None:
        """Drop a document at the first threshold that it violates."""
        if not document.text:
            return Drop("empty", 0)
        for option, part, share in _shares(statistics().repetition(document.text)):
            if drop := out_of_bounds(f"share of {part}", share, most=getattr(self, option)):
                return drop
        return None


def _shares(found: "Repetition") -> Iterator[tuple[str, str, float]]:
    """Yield the share that each rule limits, with the name of its option and its part."""
    paragraphs, lines = "duplicate paragraphs", "duplicate lines"
    yield (
        "max_duplicate_paragraphs",
        paragraphs,
        found.duplicate_paragraphs / found.paragraphs,
    )
    yield (
        "max_duplicate_paragraph_characters",
        f"characters in {paragraphs}",
        found.duplicate_paragraph_characters / found.characters,
    )
    yield "max_duplicate_lines", lines, found.duplicate_lines / found.lines
    yield (
        "max_duplicate_line_characters",
        f"characters in {lines}",
        found.duplicate_line_characters / found.characters,
    )
    for n, characters in enumerate(found.top, start=2):
        part = f"characters in the most frequent {n}-gram"
        yield f"max_top_{n}_gram", part, characters / found.characters
    for n, characters in enumerate(found.repeated, start=5):
        part = f"characters in duplicate {n}-grams"
        yield f"max_duplicate_{n}_grams", part, characters / found.characters
