"""Byte-level BPE that lib/csrc trains, against the trainer of `tokenizers`."""

import random

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from tokamake.data.tokenizers import trained
from tokamake.data.tokenizers.trained import EOD_TOKEN, bpe, byte_level_tokenizer

PARTS = ["a", "b", "c", " ", "aa", "ab", "é", "日", "1", "'s", "\n"]
SPECIAL = ["ab", "aab", "<x>", "a", "Ġa", "two words", "日"]
"""Some are spelled as merges or bytes are."""


def reference(texts: list[str], vocab_size: int, special: list[str]) -> tokenizers.Tokenizer:
    tokenizer = byte_level_tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOD_TOKEN, *special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


@pytest.mark.parametrize("seed", range(40))
def test_the_tokenizer_is_that_of_the_reference_trainer(seed: int) -> None:
    """Few different characters, so that many pairs are equally frequent and overlap."""
    draw = random.Random(seed)
    parts = PARTS[: draw.randint(2, len(PARTS))]
    texts = [
        "".join(draw.choices(parts, k=draw.randint(0, 60))) for _ in range(draw.randint(1, 30))
    ]
    special = draw.sample(SPECIAL, draw.randint(0, 3))
    vocab_size = draw.randint(258 + len(special), 420)
    own = bpe.train(lambda: iter(texts), vocab_size, special_tokens=special)
    assert own.to_str() == reference(texts, vocab_size, special).to_str()


def test_texts_of_several_batches_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"word {number % 7} and number {number}" for number in range(200)]
    whole = bpe.train(lambda: iter(texts), 320, special_tokens=[])
    monkeypatch.setattr(trained, "_BATCH", 50)
    assert bpe.train(lambda: iter(texts), 320, special_tokens=[]).to_str() == whole.to_str()
