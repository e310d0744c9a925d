"""Code shared by the kinds of trained tokenizers."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

EOD_TOKEN = "<|endoftext|>"

ReadTexts = Callable[[], Iterator[str]]
"""Function that iterates over the texts, each time from the first."""


class TooLittleTextError(Exception):
    """The texts give fewer entries than the vocabulary should have."""

    def __init__(self, num_entries: int) -> None:
        self.num_entries = num_entries


def byte_level_tokenizer(model: Any) -> "tokenizers.Tokenizer":
    """Make a tokenizer of bytes that splits text into GPT-2's words."""
    import tokenizers
    from tokenizers import decoders, pre_tokenizers

    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
