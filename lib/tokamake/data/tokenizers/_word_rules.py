"""Rules that split texts into words that a `tokenizers` tokenizer encodes one by one.

BERT's normalizer changes each character by itself. Its pre-tokenizer splits at white space and
around punctuation, and WordPiece encodes each word alone. So the tokens of a text are the tokens of
its words, and known words can be looked up. tests/data/tokenizers/test_word_rules.py compares the
tokens.
"""

import json
import unicodedata
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import tokenizers

_SPACES = " \t\n\r"
_END_OF_PUNCTUATION = 0x20000  # planes from 2 on hold no punctuation
_IDEOGRAPHS = (0x3400, 0x4DC0), (0x4E00, 0xA000)  # each is a word if handle_chinese_chars is set


class WordRules(NamedTuple):
    """Rules to split texts into words."""

    kinds: NDArray[np.uint8]
    """(0x110000,) kind of each code point: 0 part of a word, 1 space, 2 a word by itself."""
    whole: list[str]
    """Added tokens. Text between two spaces is not split if it contains one of them."""


def word_rules(fast: "tokenizers.Tokenizer") -> WordRules | None:
    """Return the rules for a tokenizer; None if tokens of a word may depend on other words."""
    if type(fast.model).__name__ != "WordPiece":  # before all of a large vocabulary is serialized
        return None
    definition = json.loads(fast.to_str())
    normalizer = definition["normalizer"] or {}
    if (
        normalizer.get("type") != "BertNormalizer"
        or definition["pre_tokenizer"] != {"type": "BertPreTokenizer"}
        or not all(map(_is_within_words, definition["added_tokens"]))
        or not _keeps_order(definition["post_processor"] or {})
    ):
        return None
    kinds = np.zeros(0x110000, np.uint8)
    kinds[[ord(space) for space in _SPACES]] = 1
    kinds[_punctuation(fast)] = 2
    if normalizer["handle_chinese_chars"]:
        for first, end in _IDEOGRAPHS:
            kinds[first:end] = 2
    return WordRules(kinds, [token["content"] for token in definition["added_tokens"]])


def _keeps_order(post_processor: dict[str, Any]) -> bool:
    """Whether a post-processor only adds special tokens, if anything."""
    if post_processor.get("type", "BertProcessing") == "BertProcessing":
        return True
    pieces = post_processor.get("single", [])
    texts = [piece for piece in pieces if "SpecialToken" not in piece]
    return post_processor["type"] == "TemplateProcessing" and len(texts) == 1


def _is_within_words(added: dict[str, Any]) -> bool:
    """Whether the text between two spaces determines where an added token matches."""
    return not (
        added["normalized"]
        or added["lstrip"]
        or added["rstrip"]
        or not added["content"]
        or any(character.isspace() for character in added["content"])
    )


def _punctuation(fast: "tokenizers.Tokenizer") -> list[int]:
    """Return the code points that the tokenizer splits off.

    Its Unicode version may be older than Python's, so the tokenizer itself decides.
    """
    characters = map(chr, range(_END_OF_PUNCTUATION))
    candidates = (c for c in characters if unicodedata.category(c)[0] in "PS")
    return [ord(character) for character in candidates if _is_split_off(fast, character)]


def _is_split_off(fast: "tokenizers.Tokenizer", character: str) -> bool:
    assert fast.normalizer is not None
    assert fast.pre_tokenizer is not None
    normalized = fast.normalizer.normalize_str(f"a{character}b")
    words = [word for word, _ in fast.pre_tokenizer.pre_tokenize_str(normalized)]
    return words[::2] == ["a", "b"]
