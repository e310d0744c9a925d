"""Settings by which text that repeats earlier text is found and cut out of documents."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from tokamake.config.fields import Settings

_OPTIONS = {
    "lines": ("min_characters",),
    "paragraphs": ("min_characters",),
    "words": ("min_words", "edge_words"),
}
"""Units of repeated text, and the settings that each has."""


class RepeatSettings(Settings):
    """Text that occurred before, in any document above, is cut out; the first occurrence stays. A
    document without any other text is dropped. In place of the section, give a unit alone: lines,
    paragraphs or words."""

    unit: Literal["lines", "paragraphs", "words"] = "lines"
    """Text that is compared: lines; paragraphs, between blank lines; or any sequence of words."""
    min_characters: Annotated[int, Field(ge=1)] = 50
    """Shorter lines and paragraphs stay. White space around them does not count."""
    min_words: Annotated[int, Field(ge=1, le=10_000)] = 50
    """All repeated sequences of at least this number of words are found; some that are shorter by
    up to `edge_words`, too."""
    edge_words: Annotated[int, Field(ge=0, le=10_000)] = 8
    """Words that may stay at either end of a repeated sequence. 0: none; the hashes of all
    sequences take about 4.5 times the disk of the default."""
    scope: Literal["data", "corpus"] = "data"
    """data: compare all corpora, in the order of the table. corpus: compare the documents of each
    corpus alone."""

    @model_validator(mode="after")
    def _check_options(self) -> "RepeatSettings":
        if 2 * self.edge_words >= self.min_words:  # the words between the edges would not be found
            raise ValueError(
                f"edge_words: {self.edge_words}: not below half of min_words {self.min_words}"
            )
        for name in {option for options in _OPTIONS.values() for option in options}:
            is_default = getattr(self, name) == type(self).model_fields[name].default
            if name not in _OPTIONS[self.unit] and not is_default:
                raise ValueError(
                    f"{name}: {getattr(self, name)}: no effect on unit {self.unit}; remove it"
                )
        return self


def _from_unit(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if value not in _OPTIONS:
        raise ValueError(f"{value}: unknown unit; choose one of {', '.join(_OPTIONS)}")
    return {"unit": value}


Repeats = Annotated[RepeatSettings, BeforeValidator(_from_unit)]
