"""Sentinels appended to a tokenizer: all else stays, and they can be taken away again."""

import json
from pathlib import Path

import pytest
import tokenizers

from tests.support.sentence_data import SentenceData
from tokamake.data.corpus.extend_tokenizer import extend_tokenizer
from tokamake.data.indexed.manifest import check_tokenizer
from tokamake.data.tokenizers import open_tokenizer
from tokamake.errors import UserError

TEXTS = ["The tokenizer's sentences, unchanged.", "def f(x): return [x] # <extra>", "[MASK] naïve"]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "##b", "the"]


def test_other_tokens_keep_their_ids(sentences: SentenceData) -> None:
    base, extended = open_tokenizer(sentences.tokenizer), open_tokenizer(sentences.extended)
    assert extended.vocab_size == base.vocab_size + 102
    assert extended.encode_batch(TEXTS) == base.encode_batch(TEXTS)
    assert (extended.eod, extended.bos) == (base.eod, base.bos)
    appended = extended.encode_batch(["[BOS] [EOS] <extra_id_0> <extra_id_1> <extra_id_99>"])
    assert appended == [[500, 501, 502, 503, 601]]
    assert extended.decode([500, 502]) == "[BOS] <extra_id_0>"


def test_without_the_appended_tokens_it_is_the_tokenizer_again(sentences: SentenceData) -> None:
    definition = json.loads((sentences.extended / "tokenizer.json").read_text())
    kept = [token for token in definition["added_tokens"] if token["id"] < 500]
    definition["added_tokens"] = kept
    base = tokenizers.Tokenizer.from_file(str(sentences.tokenizer / "tokenizer.json"))
    assert tokenizers.Tokenizer.from_str(json.dumps(definition)).to_str() == base.to_str()


def test_datasets_of_the_tokenizer_stay_valid(sentences: SentenceData, sampled: Path) -> None:
    extended = open_tokenizer(sentences.extended)
    assert extended.base == open_tokenizer(sentences.tokenizer).fingerprint
    check_tokenizer(sentences.root / "docs", extended)
    with pytest.raises(UserError, match="made with another tokenizer"):
        check_tokenizer(sentences.root / "docs", open_tokenizer(sampled / "tokenizer"))


def test_a_vocabulary_in_a_text_file_is_extended(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    extend_tokenizer(tokenizer=tmp_path / "vocab.txt", sentinels=3, output=tmp_path / "new")
    opened, base = open_tokenizer(tmp_path / "new"), open_tokenizer(tmp_path / "vocab.txt")
    assert opened.vocab_size == len(WORDS) + 5
    assert opened.encode_batch(["the AB zzz"]) == base.encode_batch(["the AB zzz"])
    assert (opened.eod, opened.bos) == (base.eod, base.bos)
    config = json.loads((tmp_path / "new/tokenizer_config.json").read_text())
    assert config["additional_special_tokens"] == [
        *("[BOS]", "[EOS]", "<extra_id_0>", "<extra_id_1>", "<extra_id_2>")
    ]


def test_transformers_reads_it(sentences: SentenceData) -> None:
    from transformers import AutoTokenizer

    fast = AutoTokenizer.from_pretrained(sentences.extended)
    assert len(fast) == 602
    assert fast.convert_tokens_to_ids(["[BOS]", "<extra_id_99>"]) == [500, 601]
    assert fast.mask_token == "[MASK]"


def test_what_cannot_be_extended_is_refused(
    sentences: SentenceData, sampled: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"has \[BOS\] already; use it as it is"):
        extend_tokenizer(tokenizer=sentences.extended, output=tmp_path / "a")
    with pytest.raises(UserError, match="--sentinels: 0: give 1 to 10,000"):
        extend_tokenizer(tokenizer=sentences.tokenizer, sentinels=0, output=tmp_path / "a")
    definition = json.loads((sentences.tokenizer / "tokenizer.json").read_text())
    text = next(text for text, token in definition["model"]["vocab"].items() if token == 400)
    del definition["model"]["vocab"][text]
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    config = (sentences.tokenizer / "tokenizer_config.json").read_text()
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(UserError, match="its vocabulary of 500 ids has gaps"):
        extend_tokenizer(tokenizer=tmp_path, output=tmp_path / "a")
    assert not (tmp_path / "a").exists()
    # Byte-level BPE has no use for sentinels here, but nothing speaks against them.
    extend_tokenizer(tokenizer=sampled / "tokenizer", output=tmp_path / "b")
