"""Filter `fineweb`: drop documents that are lists, or whose lines repeat or end without a mark.

Rules of FineWeb (Penedo et al., 2024, https://arxiv.org/abs/2406.17557, section 3.6), with the
defaults and the order of datatrove 0.10.1 (pipeline/filters/fineweb_quality_filter.py, Apache-2.0).
Lines end at line feeds; blank lines do not count.
"""

from typing import Annotated

from pydantic import Field

from tokamake.data.filters import Document, DocumentFilter, Drop, out_of_bounds
from tokamake.data.filters._characters import statistics

Number = Annotated[float, Field(ge=0)] | None
Share = Annotated[float, Field(ge=0, le=1)] | None


class Filter(DocumentFilter):
    """Drop lists, and documents whose lines repeat; null switches a rule off."""

    min_ended_lines: Share = 0.12
    """Minimum share of lines that end in a mark that ends a sentence."""
    max_short_lines: Share = 0.67
    """Maximum share of short lines."""
    short_line_characters: Annotated[int, Field(ge=0)] = 30
    """Maximum number of characters of a short line."""
    max_duplicate_characters: Share = 0.01
    """Maximum share of characters in lines that an earlier line equals."""
    max_line_feeds_per_word: Number = 0.3
    """Maximum number of line feeds divided by the number of words, punctuation marks included."""

    def setup(self) -> None:
        """Load the table of characters."""
        statistics()

    def apply(self, document: Document) -> Drop | None:
        """Drop a document at the first threshold that it violates."""
        found = statistics().lines(document.text, short_characters=self.short_line_characters)
        if not found.lines:
            return Drop("empty", 0)
        ended = found.ended_lines / found.lines
        short, line_feeds = found.short_lines / found.lines, found.line_feeds / found.words
        for quantity, number, least, most in (
            ("share of lines with an end mark", ended, self.min_ended_lines, None),
            ("share of short lines", short, None, self.max_short_lines),
            (
                "share of characters in duplicate lines",
                found.duplicate_characters / found.characters,
                None,
                self.max_duplicate_characters,
            ),
            ("line feeds per word", line_feeds, None, self.max_line_feeds_per_word),
        ):
            if drop := out_of_bounds(quantity, number, least=least, most=most):
                return drop
        return None
