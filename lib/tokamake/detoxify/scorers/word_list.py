"""Scorer `word_list`: whether a text has a word or phrase of a file."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import PrivateAttr

from tokamake.detoxify.scorers import TextScorer
from tokamake.errors import UserError


class ToxicityScorer(TextScorer):
    """1 for a text with a word of the list, 0 for any other text. Case does not matter."""

    bare_option = "path"

    path: Path
    """Text file with a word or phrase in each line. Lines that begin with # are comments."""
    _pattern: Any = PrivateAttr(default=None)

    @property
    def input_files(self) -> tuple[Path, ...]:
        return (self.path,)

    def setup(self) -> None:
        """Read the list; raises UserError if it is missing or empty."""
        try:
            lines = self.path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{self.path}: cannot be read ({error}); fix the path") from None
        entries = [line.split() for line in lines if not line.startswith("#")]
        words = [r"\s+".join(map(re.escape, entry)) for entry in entries if entry]
        if not words:
            raise UserError(f"{self.path}: no word; write one in each line")
        self._pattern = re.compile(rf"(?<!\w)(?:{'|'.join(words)})(?!\w)", re.IGNORECASE)

    def score(self, texts: Sequence[str]) -> list[float | None]:
        return [float(bool(self._pattern.search(text))) for text in texts]
