"""Filter `gopher_quality`: drop documents whose words and lines are not like prose.

Rules of Gopher (Rae et al., 2021, https://arxiv.org/abs/2112.11446, appendix A.1.1), with the
defaults and the order of datatrove 0.10.1 (pipeline/filters/gopher_quality_filter.py, Apache-2.0).
Punctuation marks are words of their own. They count where a rule divides by words, but not in
`min_words`, `max_words` and the mean length of words.
"""

from typing import Annotated

from pydantic import Field

from tokamake.data.filters import Document, DocumentFilter, Drop, out_of_bounds
from tokamake.data.filters._characters import statistics

Count = Annotated[int, Field(ge=0)] | None
Number = Annotated[float, Field(ge=0)] | None
Share = Annotated[float, Field(ge=0, le=1)] | None


class Filter(DocumentFilter):
    """Drop documents whose words and lines are not like prose; null switches a rule off."""

    min_words: Count = 50
    """Minimum number of words, without punctuation."""
    max_words: Count = 100_000
    """Maximum number of words, without punctuation."""
    min_mean_word_length: Number = 3
    """Minimum of the mean length of words in characters, without punctuation."""
    max_mean_word_length: Number = 10
    """Maximum of the mean length of words in characters, without punctuation."""
    max_hashes_per_word: Number = 0.1
    """Maximum number of # divided by the number of words."""
    max_ellipses_per_word: Number = 0.1
    """Maximum number of "..." and "…" divided by the number of words."""
    max_bullet_lines: Share = 0.9
    """Maximum share of lines that begin with • or -."""
    max_ellipsis_lines: Share = 0.3
    """Maximum share of lines that end with "..." or "…"."""
    min_alphabetic_words: Share = 0.8
    """Minimum share of words that have a letter."""
    min_stop_words: Count = 2
    """Minimum number of different stop words in the document."""
    stop_words: tuple[str, ...] = ("the", "be", "to", "of", "and", "that", "have", "with")
    """Stop words, in the case in which they count."""

    def setup(self) -> None:
        """Load the table of characters."""
        statistics()

    def apply(self, document: Document) -> Drop | None:
        """Drop a document at the first threshold that it violates."""
        found = statistics().words(document.text, list(self.stop_words))
        document.metrics["words"] = found.plain_words
        words, lines = max(1, found.words), max(1, found.lines)
        mean_length = found.plain_characters / max(1, found.plain_words)
        bullets, ellipses = found.bullet_lines / lines, found.ellipsis_lines / lines
        with_letter = found.alphabetic_words / words
        for quantity, number, least, most in (
            ("number of words", found.plain_words, self.min_words, self.max_words),
            (
                "mean word length",
                mean_length,
                self.min_mean_word_length,
                self.max_mean_word_length,
            ),
            ("# per word", found.hashes / words, None, self.max_hashes_per_word),
            ("ellipses per word", found.ellipses / words, None, self.max_ellipses_per_word),
            ("share of lines with a bullet", bullets, None, self.max_bullet_lines),
            ("share of lines that end in an ellipsis", ellipses, None, self.max_ellipsis_lines),
            ("share of words with a letter", with_letter, self.min_alphabetic_words, None),
            ("number of stop words", found.stop_words, self.min_stop_words, None),
        ):
            if drop := out_of_bounds(quantity, number, least=least, most=most):
                return drop
        return None
