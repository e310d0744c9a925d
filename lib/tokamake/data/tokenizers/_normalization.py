"""Normalization of a tokenizer as tables for lib/csrc/normalizer.hpp.

The installed package `tokenizers` normalizes every character, so its Unicode version does not
matter. Most steps change each character by itself, and sort marks: they are one table. Other steps
change clusters. A cluster is marked characters with the one before them; the package normalizes
each cluster once.
"""

import json
import unicodedata
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokamake.data.tokenizers import failure
from tokamake.data.tokenizers._exactness import Json, Unsupported, flat_steps
from tokamake.data.tokenizers._patterns import CHARACTERS, of_all_points
from tokamake.data.tokenizers._unicode_tables import kept

Normalize = Callable[[str], str]
_SINGLE = ("BertNormalizer", "NFD", "NFKD", "Lowercase", "StripAccents", "Nmt")
"""Normalizers that change each character by itself, and sort marks."""
_FORMS = ("NFC", "NFKC")
_WITHIN_WORDS = (*_SINGLE, *_FORMS, "Precompiled")
_SEPARATORS = "\n|\u2603"  # no form of another character has the last one
_CHUNK = 4096  # characters that are normalized at once
_HIGHEST_CLASS = "\u0345"  # of marks, by which they are ordered
_NFD = [{"type": "NFD"}]
_GROWTH = 12  # of UTF-8, as in lib/csrc/normalizer.cpp
_SEPARATES = 255  # rank of a character without text that separates marks
JOINS = 2
"""A mark of a character that joins the next one, as in lib/csrc/normalizer.hpp."""


class Map(NamedTuple):
    """Texts of single characters, as in lib/csrc/normalizer.hpp."""

    numbers: NDArray[np.uint32]
    """(0x110000,) number of the text of each code point; 0: it stays."""
    texts: list[str]
    ranks: NDArray[np.uint8]
    """(0x110000,) order of marks, 0 for other characters; empty: marks are not sorted."""


class Normalization(NamedTuple):
    """A normalizer as arguments of lib/csrc."""

    arguments: dict[str, Any]
    """`before`, `marks` and `after` of TextEncoder."""
    clusters: Normalize
    """Normalizes clusters."""
    whole: Normalize
    """Normalizes texts, by the package."""


@cache
def compile_normalizer(definition: bytes) -> Normalization:
    """Compile the JSON of a normalizer; Unsupported if it may not be exact."""
    steps = [*flat_steps(json.loads(definition), "normalizers")]
    places = [place for place, step in enumerate(steps) if not _is_single(step)]
    first, last = (places[0], places[-1]) if places else (len(steps), len(steps))
    middle = steps[first : last + 1]
    if len(middle) > 1 or any(step["type"] not in _FORMS for step in middle):
        found = ", ".join(sorted({step["type"] for step in middle}))
        raise Unsupported(f"its normalizer is {found}")
    clusters = _function(middle)
    marks = np.empty(0, bool)
    if middle:
        marks = kept(f"marks of {json.dumps(middle)}", partial(_marks, clusters))
    arguments = {
        "before": _map(steps[:first]),
        "marks": marks.astype(np.uint8),
        "after": _map(steps[last + 1 :]),
    }
    return Normalization(arguments, clusters, _function(steps))


def compile_words(definition: bytes) -> tuple[Normalization, list[str]]:
    """Compile a normalizer that can normalize each word between spaces alone.

    Also returns the normal form of each of CHARACTERS.

    Words without marked characters are normalized. Unsupported if that is not known to be exact.
    """
    steps = [*flat_steps(json.loads(definition), "normalizers")]
    arguments: dict[str, Any] = {}
    if steps and steps[0]["type"] == "Strip":
        first = steps.pop(0)
        arguments = {f"strips_{side}": first[f"strip_{side}"] for side in ("left", "right")}
    kinds = [step["type"] for step in steps]
    if "Strip" in kinds and "Precompiled" in kinds[kinds.index("Strip") :]:
        raise Unsupported("its normalizer strips text between other steps")
    # Otherwise Strip removes white space at the ends of a text, where it separates no words.
    steps = [step for step in steps if step["type"] != "Strip"]
    for step in steps:
        if step["type"] not in _WITHIN_WORDS and not _is_within_words(step):
            raise Unsupported(f"its normalizer is {step['type']}")
    whole = _function(steps)
    replaced = {*"".join(s["pattern"].get("String", "") for s in steps if s["type"] == "Replace")}
    forms = normal_forms(whole, CHARACTERS)
    _check_growth(CHARACTERS, forms)
    marks = [
        form != text or text in replaced or not _stays_alone(text)
        for text, form in zip(CHARACTERS, forms, strict=True)
    ]
    marked = of_all_points(np.array(marks, np.uint8))
    arguments |= {"marks": marked} if steps else {}
    return Normalization(arguments, whole, whole), forms


def _is_within_words(step: Json) -> bool:
    """Whether a Replace changes nothing but words and white space."""
    match step:
        case {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}:
            return True
        case {"type": "Replace", "pattern": {"String": text}}:
            return not any(map(str.isspace, text))
    return False


def _stays_alone(character: str) -> bool:
    """Whether a character is sure not to combine with the one before: letters, numbers, signs."""
    category = unicodedata.category(character)
    return category[0] in "LNPSZ" and not "\u1100" <= character <= "\u11ff"


def _check_growth(texts: list[str], forms: list[str]) -> None:
    """Raise Unsupported if a form is too long for the memory that lib/csrc reserves."""
    for text, form in zip(texts, forms, strict=True):
        if form != text and len(form.encode()) > _GROWTH * len(text.encode()):
            raise Unsupported(f"its normalizer writes {len(form):,} characters for {text!r}")


def _has_marks(text: str) -> bool:
    """Whether a text has a character that is sorted among marks, or whose form has one."""
    return any(map(unicodedata.combining, unicodedata.normalize("NFKD", text)))


def _is_single(step: Json) -> bool:
    """Whether a normalizer changes each character by itself."""
    if step["type"] == "Replace":
        return len(step["pattern"].get("String", "")) == 1
    return step["type"] in _SINGLE


def _function(steps: list[Json]) -> Normalize:
    """Function of the package that normalizes texts."""
    from tokenizers import Tokenizer, models

    definition = json.loads(Tokenizer(models.BPE()).to_str())
    definition["normalizer"] = {"type": "Sequence", "normalizers": steps}
    normalizer: Any = Tokenizer.from_str(json.dumps(definition)).normalizer

    def normalize(text: str) -> str:
        try:
            normalized: str = normalizer.normalize_str(text)
        except BaseException as error:
            raise Unsupported(f"its normalizer fails ({failure(error)})") from None
        return normalized

    return normalize


def _map(steps: list[Json]) -> Map | None:
    if not steps:
        return None
    replaced = "".join(
        step["pattern"]["String"] + step["content"] for step in steps if step["type"] == "Replace"
    )
    if any(step["type"] in ("NFD", "NFKD") for step in steps) and _has_marks(replaced):
        raise Unsupported("its normalizer sorts marks and replaces one")
    normalize = _function(steps)
    forms = normal_forms(normalize, CHARACTERS)
    _check_growth(CHARACTERS, forms)
    texts = [*_changed(CHARACTERS, forms)]
    places = {text: place for place, text in enumerate(texts, 1)}
    changed = [
        0 if form == text else places[form] for text, form in zip(CHARACTERS, forms, strict=True)
    ]
    numbers = of_all_points(np.array(changed, np.uint32))
    return Map(numbers, ["", *texts], _ranks(normalize, forms))


def _ranks(normalize: Normalize, forms: list[str]) -> NDArray[np.uint8]:
    """(0x110000,) ranks of marks; empty if their order never changes."""
    nfd, pairs = _function(_NFD), _decomposed(_HIGHEST_CLASS)
    written = {*"".join(forms)}
    marks = [
        text
        for text, pair in zip(CHARACTERS, pairs, strict=True)
        if pair == text + _HIGHEST_CLASS and text in written
    ]
    # Sorting keeps the order of equal marks: their places in both orders have the same sum.
    places = [{mark: n for n, mark in enumerate(nfd("".join(o)))} for o in (marks, marks[::-1])]
    sums = {mark: places[0][mark] + places[1][mark] for mark in marks}
    order = {total: rank for rank, total in enumerate(sorted({*sums.values()}), 1)}
    low, high = (f(marks, key=sums.__getitem__, default="") for f in (min, max))
    if len(order) < 2 or normalize(f"a{high}{low}") != f"a{low}{high}":
        return np.empty(0, np.uint8)
    removed = [text for text, form in zip(CHARACTERS, forms, strict=True) if not form]
    kept = normal_forms(normalize, [f"a{high}{text}{low}" for text in removed])
    ranks = {mark: order[total] for mark, total in sums.items()} | {
        text: _SEPARATES for text, form in zip(removed, kept, strict=True) if form.endswith(low)
    }
    return of_all_points(np.array([ranks.get(text, 0) for text in CHARACTERS], np.uint8))


def _decomposed(before: str = "") -> list[str]:
    """NFD of each of CHARACTERS after a text."""
    return normal_forms(_function(_NFD), [before + text for text in CHARACTERS])


def _marks(normalize: Normalize) -> NDArray[np.bool_]:
    """(0x110000,) characters that a form changes, reorders, or composes with one before."""
    forms = normal_forms(normalize, CHARACTERS)
    marked = {text for text, form in zip(CHARACTERS, forms, strict=True) if text != form}
    marked |= {mark for form in _decomposed() for mark in form[1:]}
    marked |= {
        text
        for text, pair in zip(CHARACTERS, _decomposed(_HIGHEST_CLASS), strict=True)
        if pair != _HIGHEST_CLASS + text
    }
    marks = np.zeros(0x110000, bool)
    marks[[*map(ord, marked)]] = True
    return marks


def _changed(texts: list[str], forms: list[str]) -> dict[str, None]:
    """Normal forms of the texts that are not normalized."""
    return {form: None for text, form in zip(texts, forms, strict=True) if text != form}


def normal_forms(normalize: Normalize, texts: list[str]) -> list[str]:
    """Normalize many short texts, each by itself."""
    for separator in _SEPARATORS:
        if normalize(2 * separator) != 2 * separator:
            continue
        alone = [place for place, text in enumerate(texts) if separator in text]
        plain, forms = texts.copy(), []
        for place in alone:
            plain[place] = ""
        for start in range(0, len(plain), _CHUNK):
            chunk = plain[start : start + _CHUNK]
            joined = separator.join(chunk)
            normalized = normalize(joined)
            forms += chunk if normalized == joined else normalized.split(separator)
        if len(forms) == len(texts):  # no text writes or removes a separator
            for place in alone:
                forms[place] = normalize(texts[place])
            return forms
    raise Unsupported("its normalizer changes all separators")
