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


def bert_vocabulary(folder: Path, lowercase: bool) -> Path:
    trained = tokenizers.BertWordPieceTokenizer(lowercase=lowercase)
    trained.train_from_iterator(LINES, vocab_size=200, min_frequency=1, show_progress=False)
    trained.save_model(str(folder))
    return folder / "vocab.txt"


def gpt2_vocabulary(folder: Path, special: list[str]) -> None:
    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator(LINES, vocab_size=300, special_tokens=special, show_progress=False)
    trained.save_model(str(folder))


def test_huggingface(sampled: Path) -> None:
    ours = open_tokenizer(sampled / "tokenizer")
    oracle = transformers.AutoTokenizer.from_pretrained(sampled / "tokenizer")
    assert ours.encode_batch(TEXTS) == [oracle(text)["input_ids"] for text in TEXTS]
    assert (ours.eod, ours.vocab_size) == (oracle.eos_token_id, len(oracle))
    assert [ours.decode(ids) for ids in ours.encode_batch(TEXTS)] == TEXTS


def test_gpt2(tmp_path: Path) -> None:
    gpt2_vocabulary(tmp_path, ["<|endoftext|>"])
    oracle = transformers.GPT2Tokenizer.from_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / "vocab.json"):
        ours = open_tokenizer(path)
        texts = [*TEXTS, "end<|endoftext|>start"]
        assert ours.encode_batch(texts) == [oracle(text)["input_ids"] for text in texts]
        assert (ours.eod, ours.bos) == (oracle.eos_token_id, oracle.bos_token_id)


def test_gpt2_with_other_special_tokens(tmp_path: Path) -> None:
    gpt2_vocabulary(tmp_path, ["<s>", "</s>"])
    with pytest.raises(
        UserError, match=r'its end token "<\|endoftext\|>" is not in its vocabulary'
    ):
        open_tokenizer(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text('{"eos_token": "</s>", "bos_token": {"content": "<s>"}}')
    ours = open_tokenizer(tmp_path)
    assert (ours.bos, ours.eod) == (0, 1)
    assert ours.encode_batch(["<s></s>"]) == [[0, 1]]
    config.write_text('{"eos_token": "</s>"}')
    again = open_tokenizer(tmp_path)
    assert (again.bos, again.eod) == (None, 1)
    assert again.fingerprint != ours.fingerprint
    config.write_text('{"eos_token": "</s>", "bos_token": "<start>"}')
    with pytest.raises(UserError, match='its beginning token "<start>" is not in its vocabulary'):
        open_tokenizer(tmp_path)


def test_bert(tmp_path: Path) -> None:
    for lowercase in (True, False):
        bert_vocabulary(tmp_path, lowercase)
        oracle = transformers.BertTokenizer.from_pretrained(tmp_path, do_lower_case=lowercase)
        ours = open_tokenizer(tmp_path)
        assert ours.encode_batch(TEXTS) == [
            oracle(text, add_special_tokens=False)["input_ids"] for text in TEXTS
        ]
        assert (ours.eod, ours.bos) == (oracle.sep_token_id, oracle.cls_token_id)


@pytest.mark.parametrize(
    "config",
    [
        {"do_lower_case": True},
        {"do_lower_case": False},
        {"do_lower_case": False, "strip_accents": True},
        {"do_lower_case": True, "strip_accents": False, "tokenize_chinese_chars": False},
    ],
    ids=str,
)
def test_bert_as_its_config_says(tmp_path: Path, config: dict[str, bool]) -> None:
    bert_vocabulary(tmp_path, lowercase=True)
    with (tmp_path / "vocab.txt").open("a") as file:
        file.write("é\n##é\nH\n日\n本\n##本\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    oracle = transformers.BertTokenizer.from_pretrained(tmp_path, **config)
    ours = open_tokenizer(tmp_path)
    texts = [*TEXTS, "Hé H é 日本 日本x"]
    assert ours.encode_batch(texts) == [
        oracle(text, add_special_tokens=False)["input_ids"] for text in texts
    ]


def test_bert_like_tokenizer_json(tmp_path: Path) -> None:
    """BERT's tokenizer.json comes with a config that names no eos_token."""
    vocabulary = bert_vocabulary(tmp_path, lowercase=True)
    tokenizers.BertWordPieceTokenizer(str(vocabulary)).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"sep_token": "[SEP]", "cls_token": "[CLS]"}')
    ours = open_tokenizer(tmp_path)
    words = vocabulary.read_text().splitlines()
    assert (ours.eod, ours.bos) == (words.index("[SEP]"), words.index("[CLS]"))


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
    assert (ours.eod, ours.bos, ours.vocab_size) == (oracle.eos_id(), oracle.bos_id(), 300)
    assert oracle.bos_id() not in ours.encode_batch(["a"])[0]


def test_added_tokens_count(sampled: Path, tmp_path: Path) -> None:
    larger = tokenizers.Tokenizer.from_file(str(sampled / "tokenizer/tokenizer.json"))
    larger.add_tokens(["<a>", "<b>"])
    larger.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<b>"}}))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": null}')  # states nothing
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


def test_texts_are_not_cut_or_padded(sampled: Path, tmp_path: Path) -> None:
    """Limits in a tokenizer.json are a model's; a document is encoded whole."""
    limited = tokenizers.Tokenizer.from_file(str(sampled / "tokenizer/tokenizer.json"))
    wanted = [encoding.ids for encoding in limited.encode_batch(["Hello world" * 9, "a"])]
    limited.enable_truncation(4)
    limited.enable_padding(length=4)
    limited.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    assert open_tokenizer(tmp_path).encode_batch(["Hello world" * 9, "a"]) == wanted


def test_a_panic_is_one_line(tmp_path: Path) -> None:
    """tokenizers panics at merges that do not go with the prefix."""
    model = {
        "type": "BPE",
        "vocab": {"a": 0, "b": 1, "ab": 2},
        "merges": [["a", ""]],
        "continuing_subword_prefix": "##",
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "a"}')
    with pytest.raises(UserError, match=r"cannot be loaded \(.+\); fetch it again"):
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
