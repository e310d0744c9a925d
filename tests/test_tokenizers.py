"""Each kind of tokenizer gives what its own package gives, and its end token from its own files."""

import json
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
import transformers

from tokamake.data.tokenizers import open_tokenizer
from tokamake.errors import UserError

TEXTS = ["Hello world", "  def f(x):\n\treturn x", "naïve ☃ 日本語", ""]
LINES = [
    "the quick brown fox jumps over the lazy dog",
    "Hello world, hello there",
    "def f(x): return x",
] * 20


def test_huggingface(sampled: Path) -> None:
    ours = open_tokenizer(sampled / "tokenizer")
    oracle = transformers.AutoTokenizer.from_pretrained(sampled / "tokenizer")
    assert ours.encode_batch(TEXTS) == [oracle(text)["input_ids"] for text in TEXTS]
    assert (ours.eod, ours.vocab_size) == (oracle.eos_token_id, len(oracle))
    assert [ours.decode(ids) for ids in ours.encode_batch(TEXTS)] == TEXTS


def test_gpt2(tmp_path: Path) -> None:
    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator(
        LINES, vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False
    )
    trained.save_model(str(tmp_path))
    oracle = transformers.GPT2Tokenizer.from_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / "vocab.json"):
        ours = open_tokenizer(path)
        texts = [*TEXTS, "end<|endoftext|>start"]
        assert ours.encode_batch(texts) == [oracle(text)["input_ids"] for text in texts]
        assert ours.eod == oracle.eos_token_id


def test_bert(tmp_path: Path) -> None:
    for lowercase in (True, False):
        trained = tokenizers.BertWordPieceTokenizer(lowercase=lowercase)
        trained.train_from_iterator(LINES, vocab_size=200, min_frequency=1, show_progress=False)
        trained.save_model(str(tmp_path))
        oracle = transformers.BertTokenizer.from_pretrained(tmp_path, do_lower_case=lowercase)
        ours = open_tokenizer(tmp_path)
        assert ours.encode_batch(TEXTS) == [
            oracle(text, add_special_tokens=False)["input_ids"] for text in TEXTS
        ]
        assert ours.eod == oracle.sep_token_id


def test_sentencepiece(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n".join(LINES))
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(tmp_path / "tiny"),
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )
    oracle = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tiny.model"))
    ours = open_tokenizer(tmp_path)
    assert ours.encode_batch(TEXTS) == [oracle.encode(text) for text in TEXTS]
    assert (ours.eod, ours.vocab_size) == (oracle.eos_id(), 300)
    assert oracle.bos_id() not in ours.encode_batch(["a"])[0]


def test_added_tokens_count(sampled: Path, tmp_path: Path) -> None:
    larger = tokenizers.Tokenizer.from_file(str(sampled / "tokenizer/tokenizer.json"))
    larger.add_tokens(["<a>", "<b>"])
    larger.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<b>"}}))
    ours = open_tokenizer(tmp_path)
    assert (ours.vocab_size, ours.eod) == (402, 401)
    assert ours.fingerprint != open_tokenizer(sampled / "tokenizer").fingerprint


def test_tokenizer_json_wins_over_older_files_beside_it(sampled: Path, tmp_path: Path) -> None:
    larger = tokenizers.Tokenizer.from_file(str(sampled / "tokenizer/tokenizer.json"))
    larger.add_special_tokens(["<|im_end|>"])
    larger.save(str(tmp_path / "tokenizer.json"))
    larger.model.save(str(tmp_path))
    assert (tmp_path / "vocab.json").exists()
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    ours = open_tokenizer(tmp_path)
    oracle = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    text = "one<|im_end|>two"
    assert ours.encode_batch([text]) == [oracle(text)["input_ids"]]
    assert (ours.eod, ours.vocab_size) == (400, 401)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.txt").write_text("[UNK]\n[SEP]\n")
    with pytest.raises(UserError, match=r"name the file, vocab\.txt or vocab\.json"):
        open_tokenizer(tmp_path)


def test_mistakes(sampled: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file or folder"):
        open_tokenizer(tmp_path / "none")
    with pytest.raises(UserError, match=r"holds no tokenizer\.json"):
        open_tokenizer(tmp_path)
    content = (sampled / "tokenizer/tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match="no eos_token"):
        open_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    with pytest.raises(UserError, match='end token "</s>" is not in its vocabulary'):
        open_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(content[:100])
    with pytest.raises(UserError, match="cannot be loaded"):
        open_tokenizer(tmp_path)
