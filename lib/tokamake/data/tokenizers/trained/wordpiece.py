"""WordPiece as in BERT, lower-cased."""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tokamake.data.tokenizers.trained import ReadTexts

if TYPE_CHECKING:
    import tokenizers

MINIMUM = 261
"""Minimum vocabulary: the special tokens and some characters."""
SPECIAL_TOKENS = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
    "bos_token": "[CLS]",
    "eos_token": "[SEP]",
}
_OWN_TOKENS = list(dict.fromkeys(SPECIAL_TOKENS.values()))
_MAX_CHARACTERS = 1000


def train(
    texts: ReadTexts, vocab_size: int, *, special_tokens: Sequence[str]
) -> "tokenizers.Tokenizer":
    """Train BERT's WordPiece.

    The trainer gets the entries for single characters. Its own choice among equally frequent
    characters, and the ids of characters inside words, would depend on the order of words.
    """
    from tokenizers import models, trainers

    special = [*_OWN_TOKENS, *special_tokens]
    # A quarter of the vocabulary: a character can take two entries, one at the beginning of words
    # and one inside words.
    limit = min(_MAX_CHARACTERS, (vocab_size - len(special)) // 4)
    characters = _frequent_characters(texts(), limit)
    # The trainer keeps the order of special tokens, so the entries inside words pose as such.
    inner = ["##" + character for character in characters if _can_be_inside_word(character)]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=[*special, *inner],
        initial_alphabet=characters,
        limit_alphabet=len(characters),
        show_progress=sys.stderr.isatty(),
    )
    trained = _bert_tokenizer(models.WordPiece(unk_token="[UNK]"))
    trained.train_from_iterator(texts(), trainer)
    # A second tokenizer with the same vocabulary, where `inner` is not special.
    tokenizer = _bert_tokenizer(models.WordPiece(trained.get_vocab(), unk_token="[UNK]"))
    tokenizer.add_special_tokens(special)
    return tokenizer


def _bert_tokenizer(model: Any) -> "tokenizers.Tokenizer":
    """Make a tokenizer of lower-cased text without accents, split at spaces and punctuation."""
    import tokenizers
    from tokenizers import decoders, normalizers, pre_tokenizers, processors

    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    sep, cls = ((token, _OWN_TOKENS.index(token)) for token in ("[SEP]", "[CLS]"))
    tokenizer.post_processor = processors.BertProcessing(sep, cls)
    return tokenizer


def _frequent_characters(texts: Iterator[str], limit: int) -> list[str]:
    """Return the most frequent characters of normalized text; at a tie, the lowest code points."""
    from tokenizers import normalizers

    raw_counts: Counter[str] = Counter()
    for text in texts:
        raw_counts.update(text)
    # The normalizer changes each character by itself: normalize each distinct one once.
    normalizer = normalizers.BertNormalizer(lowercase=True)
    counts: Counter[str] = Counter()
    for character, count in raw_counts.items():
        for normal in normalizer.normalize_str(character).strip():
            counts[normal] += count
    return sorted(sorted(counts, key=lambda c: (-counts[c], c))[:limit])


def _can_be_inside_word(character: str) -> bool:
    from tokenizers import normalizers, pre_tokenizers

    text = normalizers.BertNormalizer(lowercase=True).normalize_str(f"a{character}a")
    return len(pre_tokenizers.BertPreTokenizer().pre_tokenize_str(text)) == 1
