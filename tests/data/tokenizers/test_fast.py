"""Tokens that config files add: equal to transformers, or refused."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
import transformers

from tests.data.tokenizers.test_tokenizers import LINES, bert_vocabulary, gpt2_vocabulary
from tokamake.data.tokenizers import Tokenizer, open_tokenizer
from tokamake.data.tokenizers._fast_encoder import FastEncoder, refusal
from tokamake.errors import UserError

PARTS = (
    "the quick brown fox foxy Hello world def return x [ENT] <x> <y> <z> <s> </s> <unk> <pad> [SEP]"
    " [CLS] [MASK] <|endoftext|> <|im_start|> <|im_end|> ▁ é É ☃ 日本 _ . , ( ) ' - 1 22 <0x41> [ <"
)
WORDS = [*PARTS.split(), " ", "  ", "\n", "\t", "<|im_", "end|>", "\u0301"]


def random_texts(number: int, seed: int) -> list[str]:
    """Texts of words and added tokens, joined with and without spaces."""
    draw = random.Random(seed)
    return [
        "".join(draw.choice(WORDS) + draw.choice(["", "", " "]) for _ in range(draw.randint(0, 12)))
        for _ in range(number)
    ]


def added(content: str, **flags: bool) -> dict[str, Any]:
    names = ("lstrip", "rstrip", "normalized", "single_word")
    return {"content": content, "special": True, **dict.fromkeys(names, False), **flags}


def write_llama(folder: Path, *, kind: str = "bpe") -> None:
    (folder / "text.txt").write_text("\n".join(LINES))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=300 if kind == "bpe" else 40,
        model_type=kind,
        byte_fallback=kind == "bpe",
        user_defined_symbols=["<z>"],
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    (folder / "tokenizer.vocab").unlink()
    (folder / "text.txt").unlink()


def write_json(folder: Path) -> None:
    gpt2_vocabulary(folder, ["<|endoftext|>"])
    trained = tokenizers.ByteLevelBPETokenizer(
        str(folder / "vocab.json"), str(folder / "merges.txt")
    )
    trained.add_special_tokens(["<|endoftext|>", "<y>"])
    trained.save(str(folder / "tokenizer.json"))
    (folder / "vocab.json").unlink()
    (folder / "merges.txt").unlink()


WRITERS: dict[str, tuple[str, int, Callable[[Path], object]]] = {
    "llama": ("LlamaTokenizer", 300, write_llama),
    "gpt2": ("GPT2Tokenizer", 300, lambda folder: gpt2_vocabulary(folder, ["<|endoftext|>"])),
    "bert": ("BertTokenizer", 0, lambda folder: bert_vocabulary(folder, lowercase=True)),
    "json": ("PreTrainedTokenizerFast", 301, write_json),
}
ENDS = {"llama": "</s>", "gpt2": "<|endoftext|>", "bert": "[SEP]", "json": "<|endoftext|>"}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, int]]:
    """Folder of each kind of tokenizer, without configs, and the first free id."""
    folders = {}
    for name, (_, size, write) in WRITERS.items():
        folder = tmp_path_factory.mktemp(name)
        write(folder)
        vocabulary = folder / "vocab.txt"
        folders[name] = folder, size or len(vocabulary.read_text().splitlines())
    return folders


def configured(
    source: tuple[Path, int], kind: str, folder: Path, files: dict[str, Any]
) -> tuple[Path, int]:
    """Copy a tokenizer and write its config files; numbers in texts become free ids."""
    folder.mkdir(exist_ok=True)
    for file in source[0].iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = {"tokenizer_class": WRITERS[kind][0], **files.get("tokenizer_config", {})}
    if kind == "json":
        config = {"eos_token": "<|endoftext|>", **config}
    if "added_tokens_decoder" in config:
        config["added_tokens_decoder"] = {
            str(source[1] + number): token
            for number, token in enumerate(config["added_tokens_decoder"])
        }
    for name, content in {**files, "tokenizer_config": config}.items():
        if name == "added_tokens":
            content = {text: source[1] + number for number, text in enumerate(content)}
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder, source[1]


def assert_same(tokenizer: Tokenizer, reference: Any, texts: list[str], **options: Any) -> None:
    expected = reference(texts, add_special_tokens=False, **options)["input_ids"]
    for text, own, other in zip(texts, tokenizer.encode_batch(texts), expected, strict=True):
        assert own == other, text
    assert tokenizer.vocab_size == len(reference)
    assert tokenizer.special_tokens == {
        number for number, token in reference.added_tokens_decoder.items() if token.special
    }


PLAIN = added("<x>", special=False)
SETTINGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "decoder": {
        "tokenizer_config": {
            "eos_token": "<|im_end|>",
            "added_tokens_decoder": [added("<|im_start|>"), added("<|im_end|>"), PLAIN],
        }
    },
    "flags": {
        "tokenizer_config": {
            "added_tokens_decoder": [
                added("<x>", lstrip=True),
                added("<|im_end|>", rstrip=True, special=False),
                added("[ENT]", normalized=True),
                added("foxy", single_word=True),
            ]
        }
    },
    "added": {"added_tokens": ["<|im_start|>", "[ENT]"]},
    "added-special": {
        "added_tokens": ["<x>", "[ENT]", "<|im_end|>"],
        "special_tokens_map": {"pad_token": "<x>", "eos_token": {"content": "<|im_end|>"}},
    },
    "map": {
        "tokenizer_config": {"pad_token": "<pad>"},
        "special_tokens_map": {"mask_token": {"content": "<x>", "lstrip": True}},
    },
    "decoder-without-map": {
        "tokenizer_config": {"added_tokens_decoder": [added("<x>")]},
        "special_tokens_map": {"pad_token": "<pad>"},
    },
    "map-additional": {"special_tokens_map": {"additional_special_tokens": ["<x>", "<z>"]}},
    "additional": {"tokenizer_config": {"additional_special_tokens": ["<x>", "<z>"]}},
    "extra": {
        "tokenizer_config": {
            "extra_special_tokens": ["<x>"],
            "additional_special_tokens": ["[ENT]"],
        }
    },
    "extra-names": {
        "tokenizer_config": {"extra_special_tokens": {"image_token": "<x>"}, "audio_token": "[ENT]"}
    },
    "null": {"tokenizer_config": {"pad_token": None, "mask_token": None}},
    "ignored-added": {
        "tokenizer_config": {"added_tokens_decoder": [added("<x>")]},
        "added_tokens": ["[ENT]"],
    },
}


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_added_tokens_agree_with_transformers(
    written: dict[str, tuple[Path, int]], tmp_path: Path, kind: str, setting: str
) -> None:
    folder, _ = configured(written[kind], kind, tmp_path / "t", SETTINGS[setting])
    texts = random_texts(60, seed=len(setting))
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer = open_tokenizer(folder)
    assert_same(tokenizer, reference, texts)
    tokenizer.read_special_tokens_as_text()
    assert_same(tokenizer, reference, texts, split_special_tokens=True)


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"added_tokens": {"<x>": 7}}, 'state id 7 for the added token "<x>", but it would get'),
        ({"added_tokens": {"<x>": 900}}, 'state id 900 for the added token "<x>", but it would'),
        ({"tokenizer_config": {"added_tokens_decoder": {"900": PLAIN}}}, "state id 900 for"),
        ({"tokenizer_config": {"added_tokens_decoder": [1]}}, "cannot be loaded"),
        ({"added_tokens": ["<x>"]}, "cannot be loaded"),
        ({"tokenizer_config": {"eos_token": "<none>"}}, 'end token "<none>" is not in its voc'),
    ],
    ids=["taken", "gap", "decoder", "no-object", "list", "end"],
)
def test_tokens_with_other_ids_than_stated_are_refused(
    written: dict[str, tuple[Path, int]],
    tmp_path: Path,
    *,
    kind: str,
    files: dict[str, Any],
    message: str,
) -> None:
    configured(written[kind], kind, tmp_path / "t", {})
    for name, content in files.items():
        path = tmp_path / "t" / f"{name}.json"
        config = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**config, **content} if config else content))
    with pytest.raises(UserError, match=message) as error:
        open_tokenizer(tmp_path / "t")
    assert "\n" not in str(error.value)


def test_two_tokens_with_one_id_are_refused(
    written: dict[str, tuple[Path, int]], tmp_path: Path
) -> None:
    """transformers drops one of them without a word."""
    folder, free = configured(written["gpt2"], "gpt2", tmp_path / "t", {})
    (folder / "added_tokens.json").write_text(json.dumps({"<x>": free, "<y>": free}))
    with pytest.raises(UserError, match='added token "<x>", but it would get None'):
        open_tokenizer(folder)


@pytest.mark.parametrize("flags", [{}, {"legacy": True}, {"add_prefix_space": False}], ids=str)
def test_llama_reads_the_config_beside_its_model(
    written: dict[str, tuple[Path, int]], tmp_path: Path, flags: dict[str, bool]
) -> None:
    template = "{{ messages[0].content }}"
    for adds_bos in (True, False, None):
        config = {**flags, "chat_template": template, "add_eos_token": False}
        config |= {} if adds_bos is None else {"add_bos_token": adds_bos}
        files = {**SETTINGS["decoder"]["tokenizer_config"], **config}
        folder, _ = configured(
            written["llama"], "llama", tmp_path / "t", {"tokenizer_config": files}
        )
        tokenizer = open_tokenizer(folder)
        reference = transformers.AutoTokenizer.from_pretrained(folder)
        texts = random_texts(40, seed=3)
        assert_same(tokenizer, reference, texts)
        assert [tokenizer.encode_prompt(text) for text in ("hi", " hi")] == [
            reference(text)["input_ids"] for text in ("hi", " hi")
        ]
        assert tokenizer.eod == reference.eos_token_id
        assert tokenizer.chat_template == template
        assert tokenizer.special_texts["eos_token"] == "<|im_end|>"
        for text in texts:
            ids = tokenizer.encode_batch([text])[0]
            assert tokenizer.decode(ids) == reference.decode(ids)


def test_other_sentencepiece_models_are_read_or_refused(tmp_path: Path) -> None:
    write_llama(tmp_path, kind="unigram")
    own = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    config = tmp_path / "tokenizer_config.json"
    config.write_text('{"eos_token": "<z>", "add_bos_token": false, "chat_template": "{{ 1 }}"}')
    tokenizer = open_tokenizer(tmp_path)
    assert tokenizer.eod == own.piece_to_id("<z>")
    assert (tokenizer.adds_bos, tokenizer.chat_template) == (False, "{{ 1 }}")
    # Encoding never samples, whatever the config of other programs says.
    config.write_text('{"sp_model_kwargs": {"enable_sampling": true, "alpha": 0.1}}')
    assert open_tokenizer(tmp_path).encode_batch(LINES) == own.encode(LINES)
    config.write_text('{"tokenizer_class": "T5Tokenizer", "extra_special_tokens": ["<x>"]}')
    with pytest.raises(UserError, match='add the token "<x>", which is supported with tok'):
        open_tokenizer(tmp_path)
    config.write_text('{"tokenizer_class": "LlamaTokenizer"}')
    with pytest.raises(UserError, match="a unigram model, but tokenizer_class LlamaTokenizer"):
        open_tokenizer(tmp_path)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "json"])
@pytest.mark.parametrize("is_plain", [False, True])
def test_fast_encoders_agree_with_transformers(
    written: dict[str, tuple[Path, int]], tmp_path: Path, *, kind: str, is_plain: bool
) -> None:
    folder, _ = configured(written[kind], kind, tmp_path / "t", SETTINGS["decoder"])
    tokenizer = open_tokenizer(folder)
    if is_plain:
        tokenizer.read_special_tokens_as_text()
    assert not refusal(tokenizer)
    texts = random_texts(500, seed=5)
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    options = {"add_special_tokens": False, "split_special_tokens": is_plain}
    expected = reference(texts, **options)["input_ids"]
    ids, lengths = FastEncoder(tokenizer).encode(texts)
    assert lengths.tolist() == [*map(len, expected)]
    assert ids.tolist() == [token for tokens in expected for token in tokens]


def test_merges_are_loaded_when_a_text_is_encoded(tmp_path: Path) -> None:
    write_json(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    path = tmp_path / "tokenizer.json"
    whole = tokenizers.Tokenizer.from_file(str(path))
    tokenizer = open_tokenizer(tmp_path)
    assert json.loads(tokenizer.definition()) == json.loads(whole.to_str())
    texts = random_texts(200, seed=6)
    assert tokenizer.encode_batch(texts) == [whole.encode(text).ids for text in texts]
    definition = json.loads(path.read_text())
    definition["model"]["merges"].append(["no such", "token"])
    path.write_text(json.dumps(definition))
    tokenizer = open_tokenizer(tmp_path)
    assert "merge is not in its vocabulary" in refusal(tokenizer)
    with pytest.raises(UserError, match=r"tokenizer.json: cannot be loaded \(.*; fetch it again"):
        tokenizer.encode_batch(["a"])
