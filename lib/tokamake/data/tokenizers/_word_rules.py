"""Tokenizers of the `tokenizers` package whose words do not depend on their surroundings.

BERT's normalizer changes each character by itself, and its pre-tokenizer splits at white space and
around punctuation; then WordPiece takes word by word. So a text has the tokens of its words, and
the tokens of a known word are looked up. Evidence: tests/data/tokenizers/test_word_rules.py.
"""

import json
import unicodedata
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import tokenizers

_SPACES = " \t\n\r"
_PLANES = 0x20000  # beyond lies no punctuation
_IDEOGRAPHS = (0x3400, 0x4DC0), (0x4E00, 0xA000)  # each a word, if the normalizer is to say so


class WordRules(NamedTuple):
    """How texts are split into words that a tokenizer encodes one by one."""

    kinds: NDArray[np.uint8]
    """(0x110000,) of each code point: 0 in a word, 1 a space, 2 a word of its own."""
    whole: list[str]
    """Texts that keep all around them, up to the next spaces, together: added tokens."""


def word_rules(fast: "tokenizers.Tokenizer") -> WordRules | None:
    """Rules for a tokenizer, or None where a word may depend on its surroundings."""
    stated = json.loads(fast.to_str())
    normalizer = stated["normalizer"] or {}
    if (
        stated["model"]["type"] != "WordPiece"
        or normalizer.get("type") != "BertNormalizer"
        or stated["pre_tokenizer"] != {"type": "BertPreTokenizer"}
        or not all(map(_stands_in_words, stated["added_tokens"]))
        or not _keeps_order(stated["post_processor"] or {})
    ):
        return None
    kinds = np.zeros(0x110000, np.uint8)
    kinds[[ord(space) for space in _SPACES]] = 1
    kinds[_punctuation(fast)] = 2
    if normalizer["handle_chinese_chars"]:
        for first, end in _IDEOGRAPHS:
            kinds[first:end] = 2
    return WordRules(kinds, [token["content"] for token in stated["added_tokens"]])


def _keeps_order(post_processor: dict[str, Any]) -> bool:
    """Whether a post-processor adds special tokens, if any, and leaves the others as they are."""
    if post_processor.get("type", "BertProcessing") == "BertProcessing":
        return True
    pieces = post_processor.get("single", [])
    texts = [piece for piece in pieces if "SpecialToken" not in piece]
    return post_processor["type"] == "TemplateProcessing" and len(texts) == 1


def _stands_in_words(added: dict[str, Any]) -> bool:
    """Whether an added token is found by what is between two spaces alone."""
    return not (
        added["normalized"]
        or added["lstrip"]
        or added["rstrip"]
        or not added["content"]
        or any(character.isspace() for character in added["content"])
    )


def _punctuation(fast: "tokenizers.Tokenizer") -> list[int]:
    """Code points that the tokenizer itself splits off: its Unicode may be older than Python's."""
    characters = filter(_is_punctuation, map(chr, range(_PLANES)))
    return [ord(character) for character in characters if _stands_alone(fast, character)]


def _is_punctuation(character: str) -> bool:
    return unicodedata.category(character)[0] in "PS"


def _stands_alone(fast: "tokenizers.Tokenizer", character: str) -> bool:
    assert fast.normalizer is not None
    assert fast.pre_tokenizer is not None
    normal = fast.normalizer.normalize_str(f"a{character}b")
    parts = [part for part, _ in fast.pre_tokenizer.pre_tokenize_str(normal)]
    return parts[::2] == ["a", "b"]
