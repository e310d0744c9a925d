"""gigatoken with byte-level tokenizer.json files: those that it encodes differently are refused."""

import json
from pathlib import Path

import pytest

from tests.support.gigatoken_texts import (
    BYTES,
    Json,
    added,
    byte_level,
    changed,
    random_texts,
    rows,
    sequence,
    shuffled,
    split,
    unmarked,
)
from tokamake.data.tokenizers import open_tokenizer
from tokamake.data.tokenizers._exactness import REGEXES, json_refusal
from tokamake.data.tokenizers._gigatoken import Gigatoken, refusal
from tokamake.data.tokenizers._unicode_differences import load_encoders


@pytest.fixture(scope="module")
def gpt2() -> Json:
    return byte_level()


def test_an_expression_that_is_not_listed_is_refused(gpt2: Json) -> None:
    # OpenAI's original expression for GPT-4: the packages interpret its quantifiers differently.
    regex = (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|"
        r"\s++$|\s*[\r\n]|\s+(?!\S)|\s+"
    )
    text = json.dumps(byte_level(regex))
    assert "not known to be exact" in json_refusal(text.encode())
    reference, fast = load_encoders(text)
    assert reference(["4567"]) != fast(["4567"])


WORDS = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}

INEXACT = {
    "bytes without words": ("pre_tokenizer", BYTES),
    "no pre-tokenizer": ("pre_tokenizer", None),
    "digits after the split": (
        "pre_tokenizer",
        sequence(split(), {"type": "Digits", "individual_digits": True}, BYTES),
    ),
    "words after the split": ("pre_tokenizer", sequence(split(regex=REGEXES["Qwen-2"]), WORDS)),
    "a prefix space": ("pre_tokenizer", sequence(split(), BYTES | {"add_prefix_space": True})),
    "matches removed": ("pre_tokenizer", sequence(split("Removed"), BYTES)),
    "matches joined": ("pre_tokenizer", sequence(split("Contiguous"), BYTES)),
    "split without bytes": ("pre_tokenizer", split()),
    "dropout": ("model/dropout", 0.5),
    "end of word": ("model/end_of_word_suffix", "</w>"),
    "normalizer": ("normalizer", {"type": "NFC"}),
}


@pytest.mark.parametrize("change", INEXACT)
def test_tokenizers_that_differ_are_refused(gpt2: Json, change: str) -> None:
    text = json.dumps(changed(gpt2, *INEXACT[change]))
    assert json_refusal(text.encode())
    reference, fast = load_encoders(text)
    texts = [*unmarked(random_texts(2000, seed=2)), "ab\u0f71\u0f74\u0f72", "\u1e0a\u0323\u0301"]
    assert change in ("normalizer", "words after the split") or reference(texts) != fast(texts)


EXACT = {
    "split": ("pre_tokenizer", sequence(split(), BYTES)),
    "all but the matches removed": ("pre_tokenizer", sequence(split("Removed", True), BYTES)),
    "ignore_merges": ("model/ignore_merges", True),
    "no dropout": ("model/dropout", 0.0),
    "empty prefix": ("model/continuing_subword_prefix", ""),
    "unknown token": ("model/unk_token", "<|endoftext|>"),
    "truncation": (
        "truncation",
        {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
    ),
}


@pytest.mark.parametrize("change", EXACT)
def test_settings_without_effect_are_accepted(gpt2: Json, change: str, tmp_path: Path) -> None:
    text = json.dumps(changed(gpt2, *EXACT[change]))
    assert json_refusal(text.encode()) == ""
    (tmp_path / "tokenizer.json").write_text(text)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    tokenizer = open_tokenizer(tmp_path)
    texts = unmarked(random_texts(2000, seed=3))
    assert tokenizer.encode_batch(texts) == rows(*Gigatoken(tokenizer).encode(texts))


def test_any_order_of_ids_and_merges_gives_the_same_tokens(gpt2: Json) -> None:
    texts = unmarked(random_texts(3000, seed=4))
    for definition in shuffled(gpt2):
        assert json_refusal(json.dumps(definition).encode()) == ""
        reference, fast = load_encoders(json.dumps(definition))
        assert reference(texts) == fast(texts)


@pytest.mark.parametrize(
    ("tokens", "differs"),
    [
        ([{"content": "<a>"}, {"content": "<b>", "special": True}], False),
        ([{"content": "<a>", "normalized": True}, {"content": "<b>", "normalized": True}], False),
        ([{"content": "<a>"}, {"content": "<a>b"}, {"content": "<a"}, {"content": "a>b"}], False),
        ([{"content": "xyzw"}, {"content": "xyz"}, {"content": "yzwv"}, {"content": "xy"}], False),
        ([{"content": "  "}, {"content": "   "}, {"content": "\n\n"}, {"content": " a"}], False),
        ([{"content": "éa"}, {"content": "<日本>"}, {"content": "\u0301x"}], False),
        ([{"content": "é"}], True),  # the vocabulary uses it for a byte
        ([{"content": "<q>", "normalized": True}, {"content": "[w]"}], False),
        ([{"content": "foo", "single_word": True}], True),
        ([{"content": "<a>", "lstrip": True}], None),
        ([{"content": "<a>", "rstrip": True}], None),
        ([{"content": "ab", "normalized": True}, {"content": "bc"}], True),
        ([{"content": "abc", "normalized": True}, {"content": "b"}], True),
    ],
    ids=lambda value: " ".join(t["content"] for t in value) if isinstance(value, list) else "",
)
def test_added_tokens_that_differ_are_refused(
    gpt2: Json, tokens: list[Json], differs: bool | None
) -> None:
    """`differs` is None where no difference is known, but the tokenizer is refused."""
    text = json.dumps(added(gpt2, *tokens))
    contents = [token["content"] for token in tokens]
    pieces = [part for c in contents for part in (c, c[: len(c) // 2], c[1:])]
    texts = random_texts(3000, seed=6, atoms=[*pieces, "a", " ", "b", "\n", "x", "é"])
    reference, fast = load_encoders(text)
    texts = unmarked(texts)
    assert bool(json_refusal(text.encode())) == (differs is not False)
    assert (reference(texts) != fast(texts)) == bool(differs)


def test_added_tokens_get_the_ids_of_the_package(gpt2: Json, tmp_path: Path) -> None:
    """`tokenizers` ignores the ids of added tokens in tokenizer.json."""
    tokens = [{"content": "é"}, {"content": "<a>", "id": 9000}, {"content": "<b>", "id": 8000}]
    (tmp_path / "tokenizer.json").write_text(json.dumps(added(gpt2, *tokens)))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    tokenizer = open_tokenizer(tmp_path)
    assert refusal(tokenizer) == ""
    texts = unmarked(random_texts(1000, seed=13, atoms=["é", "<a>", "<b>", "x", " "]))
    assert tokenizer.encode_batch(texts) == rows(*Gigatoken(tokenizer).encode(texts))


def test_other_models_are_refused() -> None:
    for model in ({"type": "WordPiece"}, {"type": "Unigram"}, {}):
        assert "type" in json_refusal(json.dumps({"model": model}).encode())
