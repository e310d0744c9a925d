"""Filter `length`: drop documents that are too short or too long."""

from typing import Annotated

from pydantic import Field, model_validator

from tokamake.data.filters import Document, DocumentFilter, Drop, out_of_bounds

_UNITS = ("characters", "words", "lines")

Bound = Annotated[int, Field(ge=0)] | None


class Filter(DocumentFilter):
    """Drop documents that are too short or too long."""

    min_characters: Bound = None
    """Minimum number of characters."""
    max_characters: Bound = None
    """Maximum number of characters."""
    min_words: Bound = None
    """Minimum number of words, separated by white space."""
    max_words: Bound = None
    """Maximum number of words."""
    min_lines: Bound = None
    """Minimum number of lines that are not blank."""
    max_lines: Bound = None
    """Maximum number of lines that are not blank."""

    @model_validator(mode="after")
    def _check_bounds(self) -> "Filter":
        if not self.model_fields_set:
            raise ValueError(f"no bound; give one of {', '.join(type(self).model_fields)}")
        for unit in _UNITS:
            least, most = self._bounds(unit)
            if least is not None and most is not None and least > most:
                raise ValueError(f"min_{unit}: {least}: above max_{unit} {most}; swap them")
        return self

    def _bounds(self, unit: str) -> tuple[int | None, int | None]:
        return getattr(self, f"min_{unit}"), getattr(self, f"max_{unit}")

    def apply(self, document: Document) -> Drop | None:
        """Drop a document at the first bound that it violates."""
        for unit in _UNITS:
            least, most = self._bounds(unit)
            if least is None and most is None:
                continue
            length = _length(document.text, unit)
            if drop := out_of_bounds(f"number of {unit}", length, least=least, most=most):
                return drop
        return None


def _length(text: str, unit: str) -> int:
    if unit == "characters":
        return len(text)
    if unit == "words":
        return len(text.split())
    return sum(not line.isspace() for line in text.split("\n") if line)
