"""Scorer `column`: scores that another program has written, such as a client of an API."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PrivateAttr

from tokamake.data.readers import BadRecord, expand, open_input, value_of
from tokamake.detoxify.score_texts import score_all
from tokamake.detoxify.scorers import TextScorer
from tokamake.detoxify.text_lines import read_lines, toxicity_of
from tokamake.errors import UserError


def _listed(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


class ToxicityScorer(TextScorer):
    """The score of a record with the same text. Files may grow while models write more texts:
    texts are scored again only if one of them has another score."""

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

    def missing_input(self) -> str:
        """The path without files: scores may be written when the texts exist."""
        try:
            expand(self.path)
        except UserError as error:
            return f"{error}, or write the scores there before score_texts runs"
        return ""

    def has_changed(self, scored: Path) -> bool:
        """Whether the files are newer than a file of scored texts, and a text has another score.

        Texts that the files no longer have keep their scores.
        """
        try:
            status = [Path(path).stat() for path in expand(self.path)]
        except (UserError, OSError):  # the files may be gone once all texts are scored
            return False
        # A copy may keep the time of its source, but not the time of its inode.
        newest = max((max(each.st_mtime, each.st_ctime) for each in status), default=0.0)
        if newest < scored.stat().st_mtime:
            return False
        if not self._scores:
            self.setup()
        lines = (line for line in read_lines(scored) if line.value["text"] in self._scores)
        before = {line.value["text"]: toxicity_of(line) for line in lines}
        texts = [*before]
        return score_all(texts, self.score, name="scorer column") != [*before.values()]

    def score(self, texts: Sequence[str]) -> list[float | None]:
        """Look texts up; raises UserError for a text that no record has."""
        for text in texts:
            if text not in self._scores:
                raise UserError(
                    f"{', '.join(self.path)}: no score of the text {text[:40]!r}; add a "
                    "score of each text, and rerun"
                )
        return [self._scores[text] for text in texts]
