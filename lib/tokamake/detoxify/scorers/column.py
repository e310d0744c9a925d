"""Scorer `column`: scores that another program has written, such as a client of an API."""

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PrivateAttr

from tokamake.data.readers import BadRecord, expand, open_input, value_of
from tokamake.detoxify.scorers import TextScorer
from tokamake.errors import UserError


def _listed(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


class ToxicityScorer(TextScorer):
    """The score of a record with the same text. Files may grow while models write more texts, so
    a change of them scores no text again."""

    bare_option = "path"

    path: Annotated[
        tuple[str, ...],
        BeforeValidator(_listed, json_schema_input_type=str | list[str]),
        Field(min_length=1),
    ]
    """Files, folders or patterns, of any raw format, with a text and its score in each record."""
    text_key: str = "text"
    """Field with the text."""
    key: str = "toxicity"
    """Field with the score, 0 to 1, or null; `score.toxicity` looks into objects."""
    _scores: dict[str, float | None] = PrivateAttr(default_factory=dict)

    def setup(self) -> None:
        """Read the files; raises UserError if one is missing or lacks a field."""
        for path in expand(self.path):
            source = open_input(path)
            for block in source.blocks((self.text_key, self.key)):
                for index, record in enumerate(block.records):
                    try:
                        if isinstance(record, BadRecord):
                            raise ValueError(record.reason)
                        if not isinstance(text := value_of(record, self.text_key), str):
                            raise ValueError(f"{self.text_key} holds no text")
                        self._scores[text] = value_of(record, self.key)
                    except (KeyError, ValueError) as error:
                        place = source.place(int(block.numbers[index]), int(block.offsets[index]))
                        fault = f"no field {error}" if isinstance(error, KeyError) else str(error)
                        raise UserError(f"{place}: {fault}; fix the file or the keys") from None

    def score(self, texts: Sequence[str]) -> list[float | None]:
        """Look texts up; raises UserError for a text that no record has."""
        for text in texts:
            if text not in self._scores:
                raise UserError(
                    f"{', '.join(self.path)}: no score of the text {text[:40]!r}; add a "
                    "score of each text, and rerun"
                )
        return [self._scores[text] for text in texts]
