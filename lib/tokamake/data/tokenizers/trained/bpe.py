"""Byte-level BPE as in GPT-2; lossless."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tokamake.data.tokenizers.trained import EOD_TOKEN, ReadTexts, byte_level_tokenizer

if TYPE_CHECKING:
    import tokenizers

MINIMUM = 257
"""Minimum vocabulary: all bytes and the end-of-document token."""
SPECIAL_TOKENS = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}


def train(
    texts: ReadTexts, vocab_size: int, *, special_tokens: Sequence[str]
) -> "tokenizers.Tokenizer":
    """Train byte-level BPE with the trainer of `tokenizers`."""
    from tokenizers import models, pre_tokenizers, trainers

    tokenizer = byte_level_tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOD_TOKEN, *special_tokens],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(texts(), trainer)
    return tokenizer
