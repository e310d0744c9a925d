"""Unigram models as arguments of lib/csrc: of bytes, or of words that begin with U+2581.

T5, ALBERT and XLM-RoBERTa split text at white space. Words are looked up as they are in the text.
Only new words are normalized, each by itself. mBART-50 and DeBERTa-v3 normalize the text, and split
it at U+2581. tests/data/tokenizers/test_unigram.py compares the tokens.
"""

from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from tokamake._csrc import Unigram, Vocabulary
from tokamake.data.tokenizers._byte_level import byte_ids, splits_and_prefix
from tokamake.data.tokenizers._exactness import Json, Unsupported, byte_alphabet, flat_steps
from tokamake.data.tokenizers._normalization import (
    JOINS,
    Normalization,
    Normalize,
    compile_normalizer,
    compile_words,
    normal_forms,
)
from tokamake.data.tokenizers._patterns import CHARACTERS, compile_sets, matching, of_all_points
from tokamake.data.tokenizers._sentencepiece_style import MARK, fallback_ids, metaspace_prefix

Flags = NDArray[np.bool_]
_EXTENSION = "\u0489"  # belongs to the character before it
_ALONE = (0x3400, 0xA000), (0xAC00, 0xD7A4), (0x20000, 0x40000)
"""Ranges of ideographs and Hangul syllables, which are the most characters, and join no others."""
_INSIDE = "(?:\0Joins+\0Other|\0Joins|\0Inside)+"
_WORDS = f"\0Space?{MARK}?{_INSIDE}|\0Space?{MARK}|\0Space+(?=\0Space)|\0Space"
_MARKED = f"[ {MARK}]?[^ {MARK}]+|[ {MARK}]"
_JOINED = f"[ {MARK}]?[^ {MARK}]+|{MARK}| (?! )"  # without all but the last of several spaces
_SEVERAL = [
    {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": space} for space in (" ", MARK)
]
"""Normalizers that make one space of several. U+2581 separates words as a space does."""


def arguments(tokenizer: Json, vocabulary: Vocabulary) -> tuple[dict[str, Any], Normalization]:
    """Arguments of lib/csrc and normalization of a tokenizer.json; Unsupported if not exact."""
    model, pieces = tokenizer["model"], tokenizer["model"]["vocab"]
    pre_tokenizer: Any = tokenizer.get("pre_tokenizer")
    normalizer = orjson.dumps(tokenizer.get("normalizer"))
    match [*flat_steps(pre_tokenizer, "pretokenizers")]:
        case [{"type": "WhitespaceSplit"}, metaspace]:
            if any(token.get("normalized") for token in tokenizer.get("added_tokens") or []):
                raise Unsupported("an added token is searched for in normalized text")
            normalization, forms = compile_words(normalizer)
            options, rules = _words(metaspace, normalization, forms)
        case [{"type": "Metaspace"} as metaspace]:
            normalization, rules = _text(tokenizer)
            rules["prefix"] = metaspace_prefix(metaspace)
            options = {"marks": "spaces"}
        case _:
            normalization = compile_normalizer(normalizer)
            splits, prefix = splits_and_prefix(pre_tokenizer)
            byte_ids(vocabulary, [*byte_alphabet().values()])
            options, rules = {}, {"splits": splits, "prefix": prefix}  # no byte is unknown
    if options and model.get("byte_fallback"):
        options["bytes"] = fallback_ids(vocabulary)
    if options and model.get("unk_id") is None:
        raise Unsupported("its model has no token for unknown text")
    texts = [text.encode() for text, _ in pieces] if options else _in_bytes(pieces)
    written = [*zip(texts, (score for _, score in pieces), strict=True)]
    rules["model"] = Unigram(written, unknown=model.get("unk_id"), **options)
    return rules, normalization


def _text(tokenizer: Json) -> tuple[Normalization, dict[str, Any]]:
    """Normalization and options of TextEncoder for words that begin with a space or U+2581."""
    steps = [*flat_steps(tokenizer.get("normalizer"), "normalizers")]
    if is_joined := steps[-1:] in ([step] for step in _SEVERAL):
        del steps[-1]
    match steps:
        case [_, *_, {"type": "Strip", "strip_left": False, "strip_right": True}]:
            del steps[-1]
            strips = True
        case _:
            strips = False
    if any(step in _SEVERAL or (step["type"] == "Strip" and n) for n, step in enumerate(steps)):
        raise Unsupported("its normalizer changes spaces between other steps")
    normalizer = {"type": "Sequence", "normalizers": steps}
    normalization, forms = compile_words(orjson.dumps(normalizer))
    joins, extends = _joins(normalization.whole, forms)
    _add_marks(normalization, joins, extends=extends)
    for token in tokenizer.get("added_tokens") or []:
        text = normalization.whole(token["content"]) if token.get("normalized") else ""
        has_space = any(character.isspace() or character == MARK for character in text)
        if text and (has_space or token.get("lstrip") or token.get("rstrip")):
            raise Unsupported("an added token with spaces is searched for in normalized text")
    splits = [(*compile_sets(_JOINED if is_joined else _MARKED, {}), True, not is_joined)]
    return normalization, {"splits": splits, "strips_normalized": strips}


def _add_marks(normalization: Normalization, joins: Flags, *, extends: Flags) -> None:
    """Mark characters that belong to their neighbors, if anything is marked."""
    if "marks" in normalization.arguments:
        marks = normalization.arguments["marks"] | of_all_points(extends)
        marks[of_all_points(joins)] = JOINS
        normalization.arguments["marks"] = marks


def _words(
    metaspace: Json, normalization: Normalization, forms: list[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of Unigram and of TextEncoder for words between white space.

    Args:
        forms: normal form of each of CHARACTERS.
    """
    if metaspace_prefix(metaspace) != "unless mark":
        raise Unsupported("its pre_tokenizer does not begin each word with U+2581")
    spaces = ~matching("\0Visible")
    is_space = dict(zip(CHARACTERS, spaces.tolist(), strict=True))
    # A character that is no space may become one, but may belong to the one before it.
    separates = np.zeros_like(spaces)
    for place in np.flatnonzero(spaces):
        separates[place] = forms[place] != "" and all(map(is_space.get, forms[place]))
    mark = matching(MARK)
    if forms[int(np.flatnonzero(mark)[0])] not in (" ", MARK):
        raise Unsupported("its normalizer changes U+2581")
    joins, extends = _joins(normalization.whole, forms)
    inside = ~separates & ~mark & ~joins
    sets = {"\0Space": separates, "\0Inside": inside, "\0Joins": joins, "\0Other": ~joins}
    rules = {"splits": [(*compile_sets(_WORDS, sets), True, True)], "normalizes_words": True}
    _add_marks(normalization, joins, extends=extends)
    if "marks" in normalization.arguments:  # spaces separate words, whether normalized or not
        normalization.arguments["marks"] *= of_all_points(~separates)
    return {"marks": "words", "spaces": of_all_points(spaces.astype(np.uint8))}, rules


def _joins(normalize: Normalize, forms: list[str]) -> tuple[Flags, Flags]:
    """Whether each of CHARACTERS belongs to the one after it, and to the one before it.

    A model's table of characters replaces such characters together, if they are short.
    """
    changed = [text for text, form in zip(CHARACTERS, forms, strict=True) if form not in ("", text)]
    extended = normal_forms(normalize, [text + _EXTENSION for text in changed])
    probe = next((t for t, form in zip(changed, extended, strict=True) if form == normalize(t)), "")
    if not probe:
        return np.zeros(len(CHARACTERS), bool), np.zeros(len(CHARACTERS), bool)
    codes = np.array([*map(ord, CHARACTERS)])
    places = np.flatnonzero(~np.any([(codes >= a) & (codes < b) for a, b in _ALONE], axis=0))
    texts, forms = [CHARACTERS[place] for place in places], [forms[place] for place in places]
    alone, found = normalize(probe), np.zeros((2, len(CHARACTERS)), bool)
    first = normal_forms(normalize, [text + probe + _EXTENSION for text in texts])
    last = normal_forms(normalize, [probe + text for text in texts])
    found[0, places] = [text != form + alone for text, form in zip(first, forms, strict=True)]
    found[1, places] = [text != alone + form for text, form in zip(last, forms, strict=True)]
    return found[0], found[1]


def _in_bytes(pieces: list[tuple[str, float]]) -> list[bytes]:
    """Pieces as bytes; empty if a character stands for no byte."""
    alphabet = {text: byte for byte, text in byte_alphabet().items()}
    return [
        bytes(map(alphabet.__getitem__, text)) if {*text} <= alphabet.keys() else b""
        for text, _ in pieces
    ]
