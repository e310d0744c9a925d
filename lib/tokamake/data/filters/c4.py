"""Filter `c4`: keep the lines of a page that look like sentences, and pages with enough of them.

Rules of C4 (Raffel et al., 2020, https://jmlr.org/papers/v21/20-074.html, section 2.2), with the
defaults and the order of datatrove 0.10.1 (pipeline/filters/c4_filters.py, Apache-2.0). The list of
bad words is not part of it.
"""

from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from tokamake.data.filters import Document, DocumentFilter, Drop, out_of_bounds
from tokamake.data.filters._characters import statistics

if TYPE_CHECKING:
    from tokamake._csrc import C4Lines, C4Rules

Count = Annotated[int, Field(ge=0)] | None


class Filter(DocumentFilter):
    """Drop lines that are no sentences, then documents with too few sentences."""

    end_marks: bool = True
    """Drop lines that do not end in one of . ? ! " ' or that end in "...". FineWeb: false."""
    min_words: Count = 3
    """Minimum number of words of a line, separated by white space."""
    max_word_characters: Count = 1000
    """Drop lines with a longer word."""
    remove_citations: bool = True
    """Remove [1], [], [edit] and [citation needed] from lines."""
    drop_javascript: bool = True
    """Drop lines with the word javascript."""
    policy_phrases: tuple[str, ...] = (
        "terms of use",
        "privacy policy",
        "cookie policy",
        "uses cookies",
        "use of cookies",
        "use cookies",
    )
    """Drop lines with one of these phrases. The case of ASCII letters is ignored. []: none."""
    drop_lorem_ipsum: bool = True
    """Drop documents in which a line that is left has "lorem ipsum"."""
    drop_curly_brackets: bool = True
    """Drop documents in which a line that is left has a {."""
    min_sentences: Count = 5
    """Minimum number of sentences in the lines that are left."""
    min_paragraphs: Count = None
    """Minimum number of long lines of the whole document. mC4 (Xue et al., 2021): 3."""
    min_paragraph_characters: Annotated[int, Field(ge=0)] = 200
    """Characters of a long line."""

    def setup(self) -> None:
        """Load the table of characters."""
        statistics()

    @cached_property
    def _rules(self) -> "C4Rules":
        from tokamake._csrc import C4Rules

        return C4Rules(
            max_word_characters=-1
            if self.max_word_characters is None
            else self.max_word_characters,
            min_words=self.min_words or 0,
            end_marks=self.end_marks,
            citations=self.remove_citations,
            lorem_ipsum=self.drop_lorem_ipsum,
            javascript=self.drop_javascript,
            curly_bracket=self.drop_curly_brackets,
            policy=[phrase.lower() for phrase in self.policy_phrases],
        )

    def apply(self, document: Document) -> Drop | None:
        """Drop lines, and documents whose remaining lines have too few sentences."""
        if self.min_paragraphs is not None:
            lengths = map(len, document.text.split("\n"))
            paragraphs = sum(length >= self.min_paragraph_characters for length in lengths)
            quantity = f"number of lines of {self.min_paragraph_characters:,} characters or more"
            if drop := out_of_bounds(quantity, paragraphs, least=self.min_paragraphs):
                return drop
        lines = statistics().c4_lines(document.text, self._rules)
        document.metrics.update(_dropped_lines(lines))
        if lines.refused == "{":
            return Drop("number of { above 0", document.text.count("{"))
        if lines.refused:
            number = document.text.lower().count(lines.refused)
            return Drop(f'number of "{lines.refused}" above 0', number)
        if drop := out_of_bounds("number of sentences", lines.sentences, least=self.min_sentences):
            return drop
        if not lines.text:
            return Drop("number of lines that are left below 1", 0)
        document.text = lines.text
        return None


def _dropped_lines(lines: "C4Lines") -> Iterable[tuple[str, float]]:
    """Yield the number of dropped lines by each rule that dropped some."""
    for rule, dropped in (
        ("long word", lines.long_words),
        ("no end mark", lines.no_end_mark),
        ("few words", lines.few_words),
        ("javascript", lines.javascript),
        ("policy", lines.policy),
    ):
        if dropped:
            yield f"dropped lines: {rule}", dropped
