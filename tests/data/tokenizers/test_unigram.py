"""Unigram models in lib/csrc give the tokens of the `tokenizers` package."""

from typing import Any

import numpy as np
import pytest
import tokenizers
from sentencepiece import sentencepiece_model_pb2
from tokenizers import Regex, normalizers, pre_tokenizers

from tests.support.tokenizer_texts import (
    ASSIGNED_POINTS,
    encoders,
    random_texts,
    sentencepiece_model,
)
from tokamake._csrc import Unigram

ATOMS = [
    *(
        " ",
        "\t",
        "\n",
        "\r\n",
        "\u00a0",
        "\u3000",
        "\u200b",
        "\u200c",
        "\x0b",
        "\x01",
        "\u2581",
        "<unk>",
    ),
    *("\ufb01", "\u00aax", "a\u0301", "\u0489", "\u0600", "Hello", "the", "１", "½", "☃☃", "``"),
    *("e\u0323\u0301", "''", "É", "각", "\u1100\u1161\u11a8", "´", "<q>", "中文，。", "   "),
    *("É\uff9e", "A\U0001f3fb", "A\u0e33", "\u0600A", "\u00a0\u20dd"),  # join others
    *("<new>", "<mask>", "\u0600", "\r", "\x85"),
]
T5 = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])


def unigram(rule: str, *, byte_fallback: bool = False) -> Any:
    """Return T5's tokenizer, with a vocabulary and rules of normalization of sentencepiece."""
    model = sentencepiece_model_pb2.ModelProto()
    model.ParseFromString(
        sentencepiece_model(
            model_type="unigram",
            byte_fallback=byte_fallback,
            normalization_rule_name=rule,
            vocab_size=900,
            hard_vocab_limit=False,
        )
    )
    pieces = [(piece.piece, piece.score) for piece in model.pieces]
    tokenizer: Any = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, 0, byte_fallback))
    if rules := model.normalizer_spec.precompiled_charsmap:
        tokenizer.normalizer = normalizers.Precompiled(rules)
    tokenizer.pre_tokenizer = T5
    tokenizer.add_special_tokens(["<q>"])
    return tokenizer


def check(tokenizer: Any, *, times: int, count: int = 600) -> None:
    """Compare the tokens of random texts, also from the cache."""
    reason, encode = encoders(tokenizer.to_str().encode(), "tokenizers")
    assert reason == ""
    texts = random_texts(count * times, seed=11)
    texts += random_texts(count * times, seed=12, atoms=ATOMS)
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    expected = [encoding.ids for encoding in encodings]
    assert encode(texts) == expected
    assert encode(texts) == expected


@pytest.mark.parametrize("byte_fallback", [False, True])
@pytest.mark.parametrize("rule", ["nmt_nfkc", "nmt_nfkc_cf", "identity"])
def test_words_of_t5_give_the_same_tokens(rule: str, byte_fallback: bool, times: int) -> None:
    check(unigram(rule, byte_fallback=byte_fallback), times=times)


def test_albert_normalizes_words_in_several_steps(times: int) -> None:
    tokenizer = unigram("nmt_nfkc")
    steps = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"'), normalizers.NFKD()]
    steps += [normalizers.StripAccents(), normalizers.Lowercase(), tokenizer.normalizer]
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(Regex(" {2,}"), " ")])
    check(tokenizer, times=times)


@pytest.mark.parametrize("left", [False, True])
def test_stripped_text_gives_the_same_tokens(left: bool, times: int) -> None:
    tokenizer = unigram("nmt_nfkc")
    strip = normalizers.Strip(left=left, right=True)
    tokenizer.normalizer = normalizers.Sequence([strip, tokenizer.normalizer])
    check(tokenizer, times=times, count=500)


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_text_of_marked_spaces_gives_the_same_tokens(scheme: str, times: int) -> None:
    tokenizer = unigram("identity", byte_fallback=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.normalizer = normalizers.NFKC()
    check(tokenizer, times=times)


RIGHT = normalizers.Strip(left=False, right=True)
ONE_SPACE = normalizers.Replace(Regex(" {2,}"), " ")
ONE_MARK = normalizers.Replace(Regex(" {2,}"), "\u2581")
QUOTES = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]


@pytest.mark.parametrize(
    ("rule", "before", "after", "scheme"),
    [
        ("nmt_nfkc", [], [], "always"),
        ("nmt_nfkc", [], [ONE_SPACE], "always"),  # mBART-50, Pegasus
        ("nmt_nfkc", [], [ONE_SPACE], "first"),  # XGLM
        ("nmt_nfkc", [], [RIGHT, ONE_MARK], "always"),  # BGE-M3
        ("nmt_nfkc_cf", [normalizers.Strip()], [ONE_SPACE], "never"),  # DeBERTa-v3
        ("identity", QUOTES, [], "always"),  # mLUKE
        ("identity", [], [RIGHT, ONE_MARK], "first"),  # LayoutXLM
    ],
)
def test_normalized_text_of_marked_spaces_gives_the_same_tokens(
    rule: str, before: list[Any], after: list[Any], scheme: str, times: int
) -> None:
    tokenizer = unigram(rule)
    table = [] if rule == "identity" else [tokenizer.normalizer]
    tokenizer.normalizer = normalizers.Sequence([*before, *table, *after])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.add_tokens(["<new>"])  # searched for in normalized text
    tokenizer.add_special_tokens([tokenizers.AddedToken("<mask>", lstrip=True)])
    check(tokenizer, times=times, count=800)


@pytest.mark.grid
@pytest.mark.parametrize("split", [True, False], ids=["words", "text"])
def test_every_code_point_gives_the_same_tokens(split: bool) -> None:
    tokenizer = unigram("nmt_nfkc", byte_fallback=True)
    if not split:
        tokenizer.normalizer = normalizers.Sequence([tokenizer.normalizer, ONE_SPACE])
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    _, encode = encoders(tokenizer.to_str().encode(), "tokenizers")
    points = [*map(chr, ASSIGNED_POINTS)]
    around = [f"a{c}b {c}\u0301 {c}<q>{c}\u00aa\u0489 日{c}" for c in points]
    texts = ["".join(around[i : i + 100]) for i in range(0, len(around), 100)]
    assert encode(texts) == [
        e.ids for e in tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    ]


def test_equal_scores_and_unknown_text_give_the_same_tokens() -> None:
    pieces = [("<unk>", 0.0), ("\u2581", -1.0), ("a", -1.0), ("aa", -2.0), ("aaa", -3.0)]
    pieces += [("xy", -40.0), ("b", -2.0), ("ab", -3.0), ("a", -1.5), ("\u2581a", -2.0)]
    tokenizer: Any = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, 0, False))
    tokenizer.pre_tokenizer = T5
    _, encode = encoders(tokenizer.to_str().encode(), "tokenizers")
    texts = random_texts(4000, seed=5, atoms=[*"abxy ", "<unk>"])
    assert encode(texts) == [
        e.ids for e in tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    ]


def test_bytes_give_the_same_tokens(times: int) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["th", "the", "Ġthe", "Ġ", "ÃŃ", "ing", "e", "日"]
    pieces = [(text, -float(n % 7) - 1) for n, text in enumerate(dict.fromkeys(alphabet + words))]
    tokenizer: Any = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, None, False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens(["<q>"])
    check(tokenizer, times=times)


def test_models_that_are_not_exact_are_refused() -> None:
    tokenizer = unigram("nmt_nfkc")

    def reason(**changes: Any) -> str:
        changed = tokenizers.Tokenizer.from_str(tokenizer.to_str())
        for name, value in changes.items():
            setattr(changed, name, value)
        return encoders(changed.to_str().encode(), "tokenizers")[0]

    assert reason() == ""
    assert "is Prepend" in reason(normalizer=normalizers.Prepend("a"))
    between = normalizers.Sequence([normalizers.NFC(), normalizers.Strip(), tokenizer.normalizer])
    assert "strips text between" in reason(normalizer=between)
    assert "is Replace" in reason(normalizer=normalizers.Replace(" a", "b"))
    never = pre_tokenizers.Metaspace(prepend_scheme="never")
    whole = pre_tokenizers.Metaspace(split=False)
    split = pre_tokenizers.WhitespaceSplit()
    assert "begin each word" in reason(pre_tokenizer=pre_tokenizers.Sequence([split, never]))
    assert "not known" in reason(pre_tokenizer=whole, normalizer=normalizers.NFC())
    assert "U+2581" in reason(normalizer=normalizers.Replace("\u2581", "a"))
    pieces = [("a", 0.0), ("\u2581", 0.0)]
    assert "unknown text" in reason(model=tokenizers.models.Unigram(pieces, None, False))
    tokenizer.add_tokens(["new"])
    assert "normalized text" in reason()

    text = pre_tokenizers.Metaspace()
    assert reason(pre_tokenizer=text) == ""
    first = normalizers.Sequence([ONE_SPACE, tokenizer.normalizer])
    assert "changes spaces" in reason(pre_tokenizer=text, normalizer=first)
    left = normalizers.Sequence([tokenizer.normalizer, normalizers.Strip(right=False)])
    assert "changes spaces" in reason(pre_tokenizer=text, normalizer=left)
    tokenizer.add_tokens(["a  b"])
    assert "with spaces is searched" in reason(pre_tokenizer=text)


def test_unigram_checks_its_arguments() -> None:
    with pytest.raises(ValueError, match="unknown marks"):
        Unigram([(b"a", 0.0)], marks="all")
    with pytest.raises(ValueError, match="0x110000"):
        Unigram([(b"a", 0.0)], marks="words", unknown=0)
    with pytest.raises(ValueError, match="256 bytes"):
        Unigram([(b"a", 0.0)], bytes=np.zeros(3, np.uint32))
