"""Tokens of an objective, kinds of word pieces, and n-grams."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.sentence_data import SentenceData
from tokamake.config.objective import sample_settings
from tokamake.config.training import TrainSettings
from tokamake.data.samples.sentence_masking import (
    ABSENT,
    BOUNDARY,
    CONTINUATION,
    WORD,
    make_masking,
    ngram_probabilities,
    piece_kinds,
)
from tokamake.data.tokenizers import open_tokenizer
from tokamake.errors import UserError


def settings(**train: Any) -> dict[str, Any]:
    return sample_settings(TrainSettings.model_validate({"sequence_length": 64, **train}))


def test_tokens_are_those_of_the_tokenizer(sentences: SentenceData) -> None:
    opened = open_tokenizer(sentences.extended)
    masked = make_masking(settings(objective="masked"), opened, path=sentences.extended)
    assert masked.tokens == {"pad": 0, "cls": 2, "sep": 3, "mask": 4}
    assert (masked.min_sentences, masked.target_tokens, masked.max_ngram) == (2, 61, 3)
    spans = make_masking(settings(objective="span_corruption"), opened, path=sentences.extended)
    assert spans.tokens == {**masked.tokens, "bos": 500, "eos": 501}
    assert spans.sentinels == [*range(502, 602)]
    assert (spans.min_sentences, spans.target_tokens, spans.max_ngram) == (1, 62, 10)


def test_a_tokenizer_without_sentinels_is_refused_with_the_remedy(sentences: SentenceData) -> None:
    opened = open_tokenizer(sentences.tokenizer)
    with pytest.raises(UserError, match=r"has no \[BOS\], \[EOS\]; append them with tokenizer\.se"):
        make_masking(settings(objective="span_corruption"), opened, path=sentences.tokenizer)


def test_other_tokenizers_are_refused(sampled: Path) -> None:
    opened = open_tokenizer(sampled / "tokenizer")
    with pytest.raises(UserError, match="no WordPiece tokenizer, which alone marks whole words"):
        make_masking(settings(objective="masked"), opened, path=sampled / "tokenizer")


def test_a_vocabulary_without_mask_is_refused(tmp_path: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "##b"]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    opened = open_tokenizer(tmp_path)
    with pytest.raises(UserError, match=r"has no \[MASK\]; give the tokenizer of a BERT"):
        make_masking(settings(objective="masked"), opened, path=tmp_path)
    kinds = piece_kinds(opened, path=tmp_path)
    assert kinds.tolist() == [WORD, WORD, BOUNDARY, BOUNDARY, WORD, CONTINUATION]


def test_ids_without_a_token_are_absent(sentences: SentenceData, tmp_path: Path) -> None:
    definition = json.loads((sentences.tokenizer / "tokenizer.json").read_text())
    text = next(text for text, token in definition["model"]["vocab"].items() if token == 400)
    del definition["model"]["vocab"][text]
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    config = (sentences.tokenizer / "tokenizer_config.json").read_text()
    (tmp_path / "tokenizer_config.json").write_text(config)
    kinds = piece_kinds(open_tokenizer(tmp_path), path=tmp_path)
    assert kinds[400] == ABSENT
    assert (kinds == ABSENT).sum() == 1


@pytest.mark.parametrize("max_ngram", [1, 2, 3, 7, 10])
def test_cumulative_probabilities_are_numpys(max_ngram: int) -> None:
    """`choice` computes them from the probabilities of megatron-core."""
    lengths = np.arange(max_ngram, dtype=np.int64) + 1
    shares = 1.0 / lengths
    shares = shares / shares.sum(keepdims=True)
    p = shares[:max_ngram] / shares[:max_ngram].sum(keepdims=True)
    cumulative = ngram_probabilities(max_ngram)
    draws, random = np.random.RandomState(1), np.random.RandomState(1)
    chosen = [draws.choice(lengths, p=p) for _ in range(500)]
    ours = [int(np.searchsorted(cumulative, random.random(), "right")) + 1 for _ in range(500)]
    assert ours == chosen
