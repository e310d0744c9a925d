"""Byte-level BPE as in GPT-2; lossless. lib/csrc counts words and finds merges."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tokamake.data.tokenizers._exactness import byte_alphabet
from tokamake.data.tokenizers.trained import (
    EOD_TOKEN,
    ReadTexts,
    byte_level_tokenizer,
    count_words,
)

if TYPE_CHECKING:
    import tokenizers

MINIMUM = 257
"""Minimum vocabulary: all bytes and the end-of-document token."""
SPECIAL_TOKENS = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}


def train(
    texts: ReadTexts, vocab_size: int, *, special_tokens: Sequence[str]
) -> "tokenizers.Tokenizer":
    """Train byte-level BPE: the tokenizer that the trainer of `tokenizers` would make."""
    from tokenizers import models

    words = count_words(texts())
    alphabet = byte_alphabet()
    tokens = [EOD_TOKEN, *special_tokens]
    tokens += sorted({*alphabet.values()} - {*tokens})
    ids = {token: number for number, token in enumerate(tokens)}
    to_byte = {ord(character): byte for byte, character in alphabet.items()}
    spelled = [token for token in (EOD_TOKEN, *special_tokens) if {*token} <= {*alphabet.values()}]
    merges = words.merges(
        np.array([ids[character] for _, character in sorted(alphabet.items())], np.uint32),
        known=[(each.translate(to_byte).encode("latin-1"), ids[each]) for each in spelled],
        num_tokens=len(tokens),
        vocab_size=vocab_size,
    )
    for left, right, result in merges.tolist():
        if result == len(tokens):
            tokens.append(tokens[left] + tokens[right])
    vocabulary = {token: number for number, token in enumerate(tokens)}
    pairs = [(tokens[left], tokens[right]) for left, right, _ in merges.tolist()]
    tokenizer = byte_level_tokenizer(models.BPE(vocabulary, pairs))
    tokenizer.add_special_tokens([EOD_TOKEN, *special_tokens])
    return tokenizer
