"""Filter `regex`: keep, drop or change documents by a regular expression."""

import re
from functools import cached_property
from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from tokamake.data.filters import Document, DocumentFilter, Drop


def _check_pattern(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"not a regular expression ({error}); fix it") from None
    return pattern


Pattern = Annotated[str, Field(min_length=1), AfterValidator(_check_pattern)]


class Filter(DocumentFilter):
    """Keep, drop or change documents by a regular expression of Python's `re`."""

    keep: Pattern | None = None
    """Drop documents in which this expression finds nothing."""
    drop: Pattern | None = None
    """Drop documents in which this expression finds something."""
    replace: Pattern | None = None
    """Replace each text that this expression finds by `replacement`."""
    replacement: str = ""
    """Text for `replace`; \\1 is the first group. Empty: delete the match."""
    field: str = ""
    """Field of the raw record to search instead of the text, such as url or meta.language."""
    ignore_case: bool = False
    """Find letters of either case."""

    @model_validator(mode="after")
    def _check_expressions(self) -> "Filter":
        given = [name for name in ("keep", "drop", "replace") if getattr(self, name) is not None]
        if len(given) != 1:
            named = " and ".join(given) or "no expression"
            raise ValueError(f"{named}; give one of keep, drop and replace")
        if self.field and self.replace:
            raise ValueError(f"field: {self.field}: replace changes the text; remove field")
        if self.replacement and not self.replace:
            raise ValueError(f"replacement: {self.replacement}: no effect without replace")
        try:
            self._expression.sub(self.replacement, "")
        except (re.error, IndexError) as error:
            raise ValueError(f"replacement: {self.replacement}: {error}; fix it") from None
        return self

    @cached_property
    def _expression(self) -> re.Pattern[str]:
        pattern = self.keep or self.drop or self.replace or ""
        return re.compile(pattern, re.IGNORECASE if self.ignore_case else 0)

    @property
    def metadata_keys(self) -> tuple[str, ...]:
        return (self.field,) if self.field else ()

    def apply(self, document: Document) -> Drop | None:
        """Search the text or the field; the number of a drop is how often something was found."""
        if self.replace:
            document.text = self._expression.sub(self.replacement, document.text)
            return None
        where = self.field or "text"
        searched = self._field_of(document) if self.field else document.text
        found = sum(1 for _ in self._expression.finditer(searched)) if self.drop else 0
        if found:
            return Drop(f"number of matches in {where} above 0", found)
        if self.keep and not self._expression.search(searched):
            return Drop(f"number of matches in {where} below 1", 0)
        return None

    def _field_of(self, document: Document) -> str:
        """The field as a text; counts documents without it, since its name may be misspelt."""
        if (value := document.metadata.get(self.field)) is None:
            document.metrics[f"without {self.field}"] = 1
            return ""
        return str(value)
