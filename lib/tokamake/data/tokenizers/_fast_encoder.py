"""Tokenizers implemented in lib/csrc. The memory of an encoder is bounded.

`tokenize.encoder` is the only caller, and compares samples with the tokenizer's own package.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from tokamake._csrc import TextEncoder, Vocabulary, model_spans
from tokamake.data.tokenizers import Tokenizer
from tokamake.data.tokenizers import _byte_level as byte_level
from tokamake.data.tokenizers import _sentencepiece_style as sentencepiece_style
from tokamake.data.tokenizers import _unigram as unigram
from tokamake.data.tokenizers import _word_pieces as word_pieces
from tokamake.data.tokenizers._exactness import Json, Unsupported, check_added, check_model
from tokamake.data.tokenizers._normalization import (
    Normalization,
    Normalize,
    compile_normalizer,
)
from tokamake.data.tokenizers._patterns import letters


class _Rules(NamedTuple):
    arguments: dict[str, Any]
    """Arguments of lib/csrc, except for the ones that have their defaults."""
    normalize: Normalize


def refusal(tokenizer: Tokenizer) -> str:
    """Return why lib/csrc may differ from the tokenizer's own package; empty if it cannot.

    The reason is a clause whose subject "it" is the tokenizer.
    """
    try:
        _rules(tokenizer.package, tokenizer.definition())
    except Unsupported as error:
        return str(error)
    except (KeyError, TypeError, ValueError) as error:  # a later version of the format
        return f"its definition has an unknown form ({error!r})"
    return ""


class FastEncoder:
    """Encoder of lib/csrc for a tokenizer without `refusal`. Not for several threads at once."""

    package = "tokamake"

    def __init__(self, tokenizer: Tokenizer) -> None:
        rules = _rules(tokenizer.package, tokenizer.definition())
        self._normalize = rules.normalize
        self._encoder = TextEncoder(**rules.arguments)

    def encode(self, texts: list[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """Return the concatenated token ids of all texts, and the number of tokens of each."""
        return self._encoder.encode(texts, self._normalize)

    def encode_utf8(
        self, data: NDArray[np.uint8], ends: NDArray[np.int64]
    ) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """Encode texts that are concatenated in UTF-8; `ends` holds the end of each text."""
        return self._encoder.encode_utf8(data, ends, self._normalize)


def _read(definition: bytes) -> tuple[Json, Vocabulary]:
    """The definition, and its vocabulary with merges, which it lacks then."""
    if (spans := model_spans(definition)) is None:
        tokenizer = orjson.loads(definition)
        check_model(tokenizer["model"])
        vocab = tokenizer["model"]["vocab"]
        if isinstance(vocab, list):  # pieces with scores
            vocab = {text: number for number, (text, _) in enumerate(vocab)}
        return tokenizer, Vocabulary(orjson.dumps(vocab), b"[]")
    vocab, merges = (slice(*span) for span in spans[:2])
    first, second = sorted((vocab, merges), key=lambda span: span.start)
    parts = definition[: first.start], definition[first.stop : second.start]
    rest = b"null".join([*parts, definition[second.stop :]])
    tokenizer = orjson.loads(rest)
    check_model(tokenizer["model"])
    return tokenizer, Vocabulary(definition[vocab], definition[merges])


@lru_cache(maxsize=1)  # each thread has an encoder of its own
def _rules(package: str, definition: bytes) -> _Rules:
    """Read a definition; Unsupported if lib/csrc may not be exact for it."""
    if package == "sentencepiece":
        return _Rules(sentencepiece_style.model_arguments(definition), str)
    if package != "tokenizers":
        raise Unsupported("it is of another kind")
    tokenizer, vocabulary = _read(definition)
    added = tokenizer.get("added_tokens") or []
    check_added(added, vocabulary)
    arguments, normalization = _model_rules(tokenizer, vocabulary)
    normalized = [token for token in added if token.get("normalized")]
    arguments |= normalization.arguments | {
        "added": [_found(t["content"], t) for t in added if not t.get("normalized")],
        "later": [_found(normalization.whole(t["content"]), t) for t in normalized],
    }
    if not all(text for text, *_ in arguments["later"]):
        raise Unsupported("an added token is empty when it is normalized")
    if any(token.get("single_word") for token in added):
        arguments["letters"] = letters()
    return _Rules(arguments, normalization.clusters)


def _model_rules(tokenizer: Json, vocabulary: Vocabulary) -> tuple[dict[str, Any], Normalization]:
    """Arguments of lib/csrc for a kind of model, and the normalization."""
    if (kind := tokenizer["model"]["type"]) == "Unigram":
        return unigram.arguments(tokenizer, vocabulary)
    is_sentencepiece = tokenizer["model"].get("byte_fallback")
    normalizer = None if is_sentencepiece else tokenizer.get("normalizer")
    normalization = compile_normalizer(orjson.dumps(normalizer))
    if kind == "WordPiece":
        return word_pieces.arguments(tokenizer, vocabulary, normalization), normalization
    style = sentencepiece_style.json_arguments if is_sentencepiece else byte_level.arguments
    return style(tokenizer, vocabulary), normalization


def _found(text: str, token: Json) -> tuple[str, int, int]:
    """An added token as lib/csrc finds it."""
    flags = (token.get("lstrip"), token.get("rstrip"), token.get("single_word"))
    return text, token["id"], sum(bool(flag) << bit for bit, flag in enumerate(flags))
