"""Byte-level BPE with GPT-2's words by lib/csrc: which tokenizers it takes, and what it is made of.

It needs no guard, for its classes of characters are those of the `tokenizers` package, and its
memory is bounded. `tokenize.encoder` is the only caller. Evidence:
tests/data/tokenizers/test_byte_level.py.
"""

import json
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokamake._csrc import ByteLevel
from tokamake.data.tokenizers import Tokenizer, _character_classes
from tokamake.data.tokenizers._exactness import byte_level_refusal
from tokamake.data.tokenizers._unicode_differences import alphabet


def refusal(tokenizer: Tokenizer) -> str:
    """Why ours cannot stand in for a tokenizer's own package, in one clause; empty: it can."""
    if tokenizer.package != "tokenizers":
        return "it is of another kind"
    if version("tokenizers") != _character_classes.VERSION:
        return f"tokenizers {version('tokenizers')} may classify characters in another way"
    return byte_level_refusal(tokenizer.definition())


class ByteLevelEncoder:
    """A tokenizer that `refusal` says nothing against, for one thread."""

    package = "tokamake"

    def __init__(self, tokenizer: Tokenizer) -> None:
        stated = json.loads(tokenizer.definition())
        numbers = stated["model"]["vocab"]
        self._loaded = ByteLevel(
            _character_classes.table(),
            np.array(
                [numbers[character] for _, character in sorted(alphabet().items())], np.uint32
            ),
            _merges(stated["model"]),
            added=[(token["content"], token["id"]) for token in stated["added_tokens"]],
            add_prefix_space=_prefixed(stated["pre_tokenizer"]),
        )

    def unsafe(self, _: Sequence[str]) -> NDArray[np.int64]:
        """Numbers of the texts that it may encode differently: none."""
        return np.empty(0, np.int64)

    def encode(self, texts: list[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """Token ids of all texts one after the other, and how many each has."""
        return self._loaded.encode(texts)

    def encode_utf8(
        self, data: NDArray[np.uint8], ends: NDArray[np.int64]
    ) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """The same of texts in UTF-8 one after the other, and where each ends."""
        return self._loaded.encode_utf8(data, ends)


def _merges(model: dict[str, Any]) -> NDArray[np.uint32]:
    """(merges, 3) tokens of each pair, and of what it becomes; the first rank lowest."""
    numbers = model["vocab"]
    rows = [(numbers[a], numbers[b], numbers[a + b]) for a, b in model["merges"]]
    return np.array(rows, np.uint32).reshape(-1, 3)


def _prefixed(pre_tokenizer: dict[str, Any]) -> bool:
    return bool(pre_tokenizer.get("add_prefix_space"))
