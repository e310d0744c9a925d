"""Unigram model over bytes; lossless."""

import io
import tempfile
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tokamake.data.tokenizers._exactness import byte_alphabet
from tokamake.data.tokenizers.trained import (
    EOD_TOKEN,
    ReadTexts,
    TooLittleTextError,
    byte_level_tokenizer,
    count_words,
)

if TYPE_CHECKING:
    import tokenizers

MINIMUM = 257
"""Minimum vocabulary: all bytes and the end-of-document token."""
SPECIAL_TOKENS = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}

# Words arrive split and as bytes, so sentencepiece must not change or split them.
_OPTIONS: dict[str, Any] = {
    "model_type": "unigram",
    "input_format": "tsv",
    "num_threads": 8,  # fixed, because sums depend on it
    "character_coverage": 1.0,
    "normalization_rule_name": "identity",
    "add_dummy_prefix": False,
    "remove_extra_whitespaces": False,
    "split_by_whitespace": False,
    "split_by_unicode_script": False,
    "split_by_number": False,
    "max_sentence_length": 1_000_000_000,
    "unk_id": 0,
    "bos_id": -1,
    "eos_id": -1,
    "pad_id": -1,
    "minloglevel": 2,
}


def train(
    texts: ReadTexts, vocab_size: int, *, special_tokens: Sequence[str]
) -> "tokenizers.Tokenizer":
    """Train a unigram model over bytes with sentencepiece.

    The trainer of `tokenizers` sums probabilities in the order of words, which changes.
    """
    from tokenizers import models

    alphabet = byte_alphabet()
    words = Counter(dict.fromkeys(alphabet.values(), 1))
    for word, count in count_words(texts()).counts():
        words[word.decode("latin-1").translate(alphabet)] += count
    pieces = _pieces(words, vocab_size, num_special=len(special_tokens))
    special = [EOD_TOKEN, *special_tokens]
    entries = [*((token, 0.0) for token in special), *pieces]
    tokenizer = byte_level_tokenizer(models.Unigram(entries, None, False))
    tokenizer.add_special_tokens(special)
    return tokenizer


def _pieces(words: Counter[str], vocab_size: int, *, num_special: int) -> list[tuple[str, float]]:
    """Train on counted words; return the pieces with their log-probabilities.

    sentencepiece's unknown piece, which is left out, takes the place of the end-of-document token.
    So `vocab_size` - `num_special` - 1 pieces remain.
    """
    import sentencepiece

    model = io.BytesIO()
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".tsv") as table:
        table.writelines(f"{word}\t{count}\n" for word, count in sorted(words.items()))
        table.flush()
        try:
            sentencepiece.SentencePieceTrainer.train(
                input=table.name,
                model_writer=model,
                vocab_size=vocab_size - num_special,
                **_OPTIONS,
            )
        except RuntimeError as error:
            # Too little text: the message ends with the largest possible size, "<= 123."
            message = str(error)
            if "<= " not in message:
                raise
            largest = int(message.rpartition("<= ")[2].rstrip(".")) + num_special
            raise TooLittleTextError(largest) from None
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    ids = range(1, processor.get_piece_size())
    return [(processor.id_to_piece(id), processor.get_score(id)) for id in ids]
