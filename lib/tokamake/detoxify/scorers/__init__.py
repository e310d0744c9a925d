"""Scorers of toxicity, one file per scorer.

A file defines a class `ToxicityScorer`, derived from `TextScorer`. Its fields are its options in
the config, and `score` returns the toxicity of texts. A text must always get the same score.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from tokamake.config.fields import Settings


class TextScorer(Settings):
    """Base class of scorers: fields with docstrings are options, `score` scores texts."""

    bare_option: ClassVar[str] = ""
    """Option that a value alone sets: "path" accepts `word_list: words.txt`. Empty: none."""
    packages: ClassVar[tuple[str, ...]] = ()
    """Optional packages that `setup` or `score` imports: the dry run looks for them."""

    @property
    def input_files(self) -> tuple[Path, ...]:
        """Files that `setup` reads. Texts are scored again if their contents change."""
        return ()

    def missing_input(self) -> str:
        """Say which file `score` needs and lacks now; the dry run prints it. Empty: none.

        For files that another program may still write; a missing file of `input_files` is an error.
        """
        return ""

    def has_changed(self, scored: Path) -> bool:  # noqa: ARG002
        """Whether texts of a file of `score-texts` have other scores now, if files beside
        `input_files` decide them. Called at each start of the workflow, without `setup`."""
        return False

    def setup(self) -> None:
        """Load a model or other data for `score`. Called once per job, before `score`."""

    def score(self, texts: Sequence[str]) -> Sequence[float | None]:
        """Toxicity of each text, 0 to 1; None: no score. Blank texts are not passed."""
        raise NotImplementedError
