"""Byte-level BPE with GPT-2's word expression, implemented in lib/csrc.

It needs no runtime guard, because it uses the character classes of the `tokenizers` package. Its
memory is bounded. `tokenize.encoder` is the only caller. tests/data/tokenizers/test_byte_level.py
compares the tokens.
"""

import json
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokamake._csrc import ByteLevel
from tokamake.data.tokenizers import Tokenizer, _character_classes
from tokamake.data.tokenizers._exactness import byte_alphabet, byte_level_refusal


def refusal(tokenizer: Tokenizer) -> str:
    """Return why lib/csrc may differ from the tokenizer's own package; empty if it cannot.

    The reason is a clause whose subject "it" is the tokenizer.
    """
    if tokenizer.package != "tokenizers":
        return "it is of another kind"
    if version("tokenizers") != _character_classes.VERSION:
        return f"tokenizers {version('tokenizers')} may classify characters in another way"
    return byte_level_refusal(tokenizer.definition())


class ByteLevelEncoder:
    """Encoder of lib/csrc for a tokenizer without `refusal`. Not for several threads at once."""

    package = "tokamake"

    def __init__(self, tokenizer: Tokenizer) -> None:
        definition = json.loads(tokenizer.definition())
        ids = definition["model"]["vocab"]
        byte_ids = [ids[character] for _, character in sorted(byte_alphabet().items())]
        self._encoder = ByteLevel(
            _character_classes.table(),
            np.array(byte_ids, np.uint32),
            _merges(definition["model"]),
            added=[(token["content"], token["id"]) for token in definition["added_tokens"]],
            add_prefix_space=bool(definition["pre_tokenizer"].get("add_prefix_space")),
        )

    def unsafe(self, _: Sequence[str]) -> NDArray[np.int64]:
        """Return the indices of texts that may be encoded differently: always empty."""
        return np.empty(0, np.int64)

    def encode(self, texts: list[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """Return the concatenated token ids of all texts, and the number of tokens of each."""
        return self._encoder.encode(texts)

    def encode_utf8(
        self, data: NDArray[np.uint8], ends: NDArray[np.int64]
    ) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """Encode texts that are concatenated in UTF-8; `ends` holds the end of each text."""
        return self._encoder.encode_utf8(data, ends)


def _merges(model: dict[str, Any]) -> NDArray[np.uint32]:
    """(merges, 3) token ids of each pair and of its result, in the order of ranks."""
    ids = model["vocab"]
    rows = [(ids[left], ids[right], ids[left + right]) for left, right in model["merges"]]
    return np.array(rows, np.uint32).reshape(-1, 3)
