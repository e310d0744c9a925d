"""Each kind of tokenizer agrees with its own package and reads special tokens from its files."""

import json
import shutil
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
import transformers

from tests.support.bos_tokenizers import write_bos_tokenizer
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


def test_huggingface_agrees_with_transformers(sampled: Path) -> None:
    tokenizer = open_tokenizer(sampled / "tokenizer")
    reference = transformers.AutoTokenizer.from_pretrained(sampled / "tokenizer")
    assert tokenizer.encode_batch(TEXTS) == [reference(text)["input_ids"] for text in TEXTS]
    assert (tokenizer.eod, tokenizer.vocab_size) == (reference.eos_token_id, len(reference))
    assert [tokenizer.decode(ids) for ids in tokenizer.encode_batch(TEXTS)] == TEXTS


def test_gpt2_agrees_with_transformers(tmp_path: Path) -> None:
    gpt2_vocabulary(tmp_path, ["<|endoftext|>"])
    reference = transformers.GPT2Tokenizer.from_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / "vocab.json"):
        tokenizer = open_tokenizer(path)
        texts = [*TEXTS, "end<|endoftext|>start"]
        assert tokenizer.encode_batch(texts) == [reference(text)["input_ids"] for text in texts]
        assert (tokenizer.eod, tokenizer.bos) == (reference.eos_token_id, reference.bos_token_id)


def test_gpt2_reads_special_tokens_from_its_config(tmp_path: Path) -> None:
    gpt2_vocabulary(tmp_path, ["<s>", "</s>"])
    with pytest.raises(
        UserError, match=r'its end token "<\|endoftext\|>" is not in its vocabulary'
    ):
        open_tokenizer(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text('{"eos_token": "</s>", "bos_token": {"content": "<s>"}}')
    tokenizer = open_tokenizer(tmp_path)
    assert (tokenizer.bos, tokenizer.eod) == (0, 1)
    assert tokenizer.encode_batch(["<s></s>"]) == [[0, 1]]
    config.write_text('{"eos_token": "</s>"}')
    without_bos = open_tokenizer(tmp_path)
    assert (without_bos.bos, without_bos.eod) == (None, 1)
    assert without_bos.fingerprint != tokenizer.fingerprint
    config.write_text('{"eos_token": "</s>", "bos_token": "<start>"}')
    with pytest.raises(UserError, match='its beginning token "<start>" is not in its vocabulary'):
        open_tokenizer(tmp_path)


def test_bert_agrees_with_transformers(tmp_path: Path) -> None:
    for lowercase in (True, False):
        bert_vocabulary(tmp_path, lowercase)
        reference = transformers.BertTokenizer.from_pretrained(tmp_path, do_lower_case=lowercase)
        tokenizer = open_tokenizer(tmp_path)
        assert tokenizer.encode_batch(TEXTS) == [
            reference(text, add_special_tokens=False)["input_ids"] for text in TEXTS
        ]
        assert (tokenizer.eod, tokenizer.bos) == (reference.sep_token_id, reference.cls_token_id)


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
def test_bert_normalizes_like_its_config(tmp_path: Path, config: dict[str, bool]) -> None:
    bert_vocabulary(tmp_path, lowercase=True)
    with (tmp_path / "vocab.txt").open("a") as file:
        file.write("é\n##é\nH\n日\n本\n##本\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    reference = transformers.BertTokenizer.from_pretrained(tmp_path, **config)
    tokenizer = open_tokenizer(tmp_path)
    texts = [*TEXTS, "Hé H é 日本 日本x"]
    assert tokenizer.encode_batch(texts) == [
        reference(text, add_special_tokens=False)["input_ids"] for text in texts
    ]


def test_bert_as_tokenizer_json_ends_documents_with_sep(tmp_path: Path) -> None:
    """The config beside BERT's tokenizer.json has no eos_token."""
    vocabulary = bert_vocabulary(tmp_path, lowercase=True)
    tokenizers.BertWordPieceTokenizer(str(vocabulary)).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"sep_token": "[SEP]", "cls_token": "[CLS]"}')
    tokenizer = open_tokenizer(tmp_path)
    words = vocabulary.read_text().splitlines()
    assert (tokenizer.eod, tokenizer.bos) == (words.index("[SEP]"), words.index("[CLS]"))


@pytest.mark.parametrize("bos", [0, 1])
def test_sentencepiece_agrees_with_its_package(tmp_path: Path, bos: int) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n".join(LINES))
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(tmp_path / "tiny"),
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        bos_id=bos,
        unk_id=1 - bos,
        minloglevel=2,
    )
    reference = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tiny.model"))
    tokenizer = open_tokenizer(tmp_path)
    assert tokenizer.encode_batch(TEXTS) == [reference.encode(text) for text in TEXTS]
    assert (tokenizer.eod, tokenizer.bos, tokenizer.vocab_size) == (
        reference.eos_id(),
        reference.bos_id(),
        300,
    )
    assert reference.bos_id() not in tokenizer.encode_batch(["a"])[0]


def test_prompts_begin_as_those_of_transformers(sampled: Path, tmp_path: Path) -> None:
    folder = write_bos_tokenizer(sorted((sampled / "raw/docs").glob("*.jsonl")), tmp_path)
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer = open_tokenizer(folder)
    assert tokenizer.adds_bos
    for text in ("The words", "", "<s>The words"):
        own = reference.encode(text, add_special_tokens=not text.startswith("<s>"))
        assert tokenizer.encode_prompt(text) == own
    assert tokenizer.encode_batch(["The"])[0] == tokenizer.encode_prompt("The")[1:]
    assert not open_tokenizer(sampled / "tokenizer").adds_bos


@pytest.mark.parametrize("adds_bos", [True, False])
def test_the_config_decides_how_prompts_begin(
    sampled: Path, tmp_path: Path, *, adds_bos: bool
) -> None:
    folder = write_bos_tokenizer(sorted((sampled / "raw/docs").glob("*.jsonl")), tmp_path)
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "add_bos_token": adds_bos}))
    assert open_tokenizer(folder).adds_bos == adds_bos


def test_vocab_size_includes_added_tokens(sampled: Path, tmp_path: Path) -> None:
    larger = tokenizers.Tokenizer.from_file(str(sampled / "tokenizer/tokenizer.json"))
    larger.add_tokens(["<a>", "<b>"])
    larger.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<b>"}}))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": null}')
    tokenizer = open_tokenizer(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.eod) == (402, 401)
    assert tokenizer.fingerprint != open_tokenizer(sampled / "tokenizer").fingerprint


def test_tokenizer_json_takes_precedence_over_older_files(sampled: Path, tmp_path: Path) -> None:
    larger = tokenizers.Tokenizer.from_file(str(sampled / "tokenizer/tokenizer.json"))
    larger.add_special_tokens(["<|im_end|>"])
    larger.save(str(tmp_path / "tokenizer.json"))
    larger.model.save(str(tmp_path))
    assert (tmp_path / "vocab.json").exists()
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    tokenizer = open_tokenizer(tmp_path)
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    text = "one<|im_end|>two"
    assert tokenizer.encode_batch([text]) == [reference(text)["input_ids"]]
    assert (tokenizer.eod, tokenizer.vocab_size) == (400, 401)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.txt").write_text("[UNK]\n[SEP]\n")
    with pytest.raises(UserError, match=r"name the file, vocab\.txt or vocab\.json"):
        open_tokenizer(tmp_path)


def test_truncation_and_padding_of_tokenizer_json_are_ignored(
    sampled: Path, tmp_path: Path
) -> None:
    limited = tokenizers.Tokenizer.from_file(str(sampled / "tokenizer/tokenizer.json"))
    expected = [encoding.ids for encoding in limited.encode_batch(["Hello world" * 9, "a"])]
    limited.enable_truncation(4)
    limited.enable_padding(length=4)
    limited.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    assert open_tokenizer(tmp_path).encode_batch(["Hello world" * 9, "a"]) == expected


def test_a_panic_becomes_a_user_error(tmp_path: Path) -> None:
    """tokenizers panics at merges that contradict the prefix."""
    model = {
        "type": "BPE",
        "vocab": {"a": 0, "b": 1, "ab": 2},
        "merges": [["a", ""]],
        "continuing_subword_prefix": "##",
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "a"}')
    with pytest.raises(UserError, match=r"cannot be loaded \(.+\); fetch it again"):
        open_tokenizer(tmp_path).encode_batch(["a"])


def test_missing_and_damaged_tokenizers_are_refused(sampled: Path, tmp_path: Path) -> None:
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


def test_sampling_is_turned_off(
    sampled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = sampled / "tokenizer/tokenizer.json"
    content = json.loads(plain.read_text())
    content["model"]["dropout"] = 0.5
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    expected = open_tokenizer(plain.parent).encode_batch(TEXTS)
    tokenizer = open_tokenizer(tmp_path)
    assert [tokenizer.encode_batch(TEXTS) for _ in range(5)] == [expected] * 5
    assert b'"dropout":null' in tokenizer.definition()
    assert "its dropout is turned off" in capsys.readouterr().err


def test_names_with_a_prefix(tmp_path: Path) -> None:
    """GPT-2's and BERT's vocabularies have these names where Megatron's users fetch them."""
    gpt2_vocabulary(tmp_path, ["<|endoftext|>"])
    bert_vocabulary(tmp_path, lowercase=True)
    texts = [*TEXTS, "end<|endoftext|>start"]
    gpt2 = open_tokenizer(tmp_path / "vocab.json").encode_batch(texts)
    bert = open_tokenizer(tmp_path / "vocab.txt").encode_batch(texts)
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / name).rename(tmp_path / f"gpt2-{name}")
    (tmp_path / "vocab.txt").rename(tmp_path / "bert-large-uncased-vocab.txt")
    assert open_tokenizer(tmp_path / "gpt2-vocab.json").encode_batch(texts) == gpt2
    assert open_tokenizer(tmp_path / "bert-large-uncased-vocab.txt").encode_batch(texts) == bert
    with pytest.raises(UserError, match=r"name the file, bert-large-uncased-vocab.txt or gpt2-voc"):
        open_tokenizer(tmp_path)
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / f"my-{name}").write_bytes((tmp_path / f"gpt2-{name}").read_bytes())
    with pytest.raises(
        UserError, match=r"several tokenizers; name the file, gpt2-vocab.json or my"
    ):
        open_tokenizer(tmp_path)
    (tmp_path / "gpt2-merges.txt").unlink()
    with pytest.raises(UserError, match=r"holds no tokenizer\.json, vocab\.json with merges\.txt"):
        open_tokenizer(tmp_path / "gpt2-vocab.json")


def nested(depth: int) -> str:
    return '{"type":"Sequence","normalizers":[' * depth + "]}" * depth


@pytest.mark.parametrize(
    ("definition", "message"),
    [
        ('{"normalizer":' + nested(100_000) + "}", "cannot be loaded .*recursion limit"),
        ('{"added_tokens":[' + '{"single_word":false},' * 100_001 + "]}", "100,001 added tokens"),
        ('{"model":{"type":"BPE","vocab":{},"merges":[]},"pre_tokenizer":{"type":"Split",'
         '"pattern":{"Regex":"("},"behavior":"Isolated","invert":false}}', "cannot be loaded"),
    ],
    ids=["deep", "many", "regex"],
)  # fmt: skip
def test_bombs_are_refused_in_one_line(tmp_path: Path, definition: str, message: str) -> None:
    (tmp_path / "tokenizer.json").write_text(definition)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "a"}')
    with pytest.raises(UserError, match=message) as error:
        open_tokenizer(tmp_path)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500


def test_huge_files_are_refused(tmp_path: Path, sampled: Path) -> None:
    folder = tmp_path / "t"
    shutil.copytree(sampled / "tokenizer", folder)
    (folder / "chat_template.jinja").write_text("{{ 1 }}" * 200_000)
    with pytest.raises(UserError, match=r"chat_template\.jinja: more than 1,048,576 bytes"):
        open_tokenizer(folder)
    with (folder / "tokenizer.json").open("ab") as file:
        file.truncate(300 << 20)  # a sparse file
    with pytest.raises(UserError, match=r"tokenizer\.json: 314,572,800 bytes, more than"):
        open_tokenizer(folder)
