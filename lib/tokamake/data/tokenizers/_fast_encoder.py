"""BPE tokenizers, implemented in lib/csrc. Its memory is bounded.

`tokenize.encoder` is the only caller, and compares samples with the tokenizer's own package.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from tokamake._csrc import BytePairs, Vocabulary, model_spans
from tokamake.data.tokenizers import Tokenizer
from tokamake.data.tokenizers import _byte_level as byte_level
from tokamake.data.tokenizers import _sentencepiece_style as sentencepiece_style
from tokamake.data.tokenizers._exactness import Json, Unsupported, check_added, check_model
from tokamake.data.tokenizers._unicode_forms import Normalize, marks_and_function


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
        self._encoder = BytePairs(**rules.arguments)

    def encode(self, texts: list[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """Return the concatenated token ids of all texts, and the number of tokens of each."""
        return self._encoder.encode(texts, self._normalize)

    def encode_utf8(
        self, data: NDArray[np.uint8], ends: NDArray[np.int64]
    ) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """Encode texts that are concatenated in UTF-8; `ends` holds the end of each text."""
        return self._encoder.encode_utf8(data, ends, self._normalize)


def _read(definition: bytes) -> tuple[Json, Vocabulary]:
    """The definition without its vocabulary and merges, and these two."""
    if (spans := model_spans(definition)) is None:
        check_model(orjson.loads(definition)["model"])
        raise Unsupported("its definition has no merges")
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
    model, added = tokenizer["model"], tokenizer.get("added_tokens") or []
    check_added(added, vocabulary)
    if model.get("byte_fallback"):
        arguments = sentencepiece_style.json_arguments(tokenizer, vocabulary)
        marks, normalize = marks_and_function(None)
    else:
        arguments = byte_level.arguments(tokenizer, vocabulary)
        marks, normalize = marks_and_function(tokenizer.get("normalizer"))
    arguments |= {
        "added": [_found(t["content"], t) for t in added if not t.get("normalized")],
        "later": [_found(normalize(t["content"]), t) for t in added if t.get("normalized")],
        "marks": marks,
    }
    return _Rules(arguments, normalize)


def _found(text: str, token: Json) -> tuple[str, int, bool, bool]:
    """An added token as lib/csrc finds it."""
    return text, token["id"], bool(token.get("lstrip")), bool(token.get("rstrip"))
