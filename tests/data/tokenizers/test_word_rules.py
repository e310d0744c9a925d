"""Encoding word by word gives the tokens of the `tokenizers` package."""

import json
import random
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from tests.support.grids import params
from tokamake import _csrc
from tokamake.data.tokenize import encoder as tokenize_encoder
from tokamake.data.tokenize.encoder import Encoder
from tokamake.data.tokenizers import Tokenizer, open_tokenizer
from tokamake.data.tokenizers._word_rules import word_rules

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LETTERS = (
    "abcdeéÉß\u0301\u0345ΣςİДй日本がｶﾞ.,!'[]\u00ad\u200d\u00a0\u3000\ufffd\x00\x1f\t\n\r   $＋،"
)


def write_vocabulary(folder: Path, **settings: Any) -> Path:
    """Write a BERT vocabulary with unusual letters, as words and inside words."""
    folder.mkdir(exist_ok=True)
    words = [
        *LETTERS,
        *(f"##{letter}" for letter in LETTERS),
        "e",
        "##e",
        "##и",
        "i",
        "и",
        "σ",
        "##σ",
    ]
    words += ["##i", "ab", "##ab", "a.", "sep", "mask", *(f"##{n}" for n in range(10))]
    entries = (word for word in [*SPECIAL, *words] if not any(map(str.isspace, word)))
    (folder / "vocab.txt").write_text("\n".join(dict.fromkeys(entries)), encoding="utf-8")
    config = {"do_lower_case": True, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


KINDS: dict[str, dict[str, bool]] = {
    "uncased": {},
    "cased": {"do_lower_case": False},
    "stripped": {"do_lower_case": False, "strip_accents": True},
    "Chinese in words": {"tokenize_chinese_chars": False},
}


@pytest.fixture(params=KINDS)
def bert(tmp_path: Path, request: pytest.FixtureRequest) -> Tokenizer:
    return open_tokenizer(write_vocabulary(tmp_path / "bert", **KINDS[request.param]))


def by_words(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    encoder = Encoder(tokenizer, workers=1)
    encoded = encoder(texts)
    assert isinstance(encoder._words, _csrc.Words)
    ends = np.cumsum(encoded.lengths)
    return [part.tolist() for part in np.split(encoded.ids, ends[:-1])]


def test_random_texts_give_the_same_tokens(bert: Tokenizer) -> None:
    rng = random.Random(3)
    parts = [*LETTERS, "ab", "[SEP]", " [MASK] ", "[sep]", "[SE", "x" * 150, "ab" * 60]
    texts = ["".join(rng.choices(parts, k=rng.choice([0, 1, 5, 900]))) for _ in range(600)]
    assert by_words(bert, texts) == bert.encode_batch(texts)


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize("bert", params(KINDS, ["uncased"]), indirect=True)
def test_every_code_point_gives_the_same_tokens(bert: Tokenizer) -> None:
    points = [chr(point) for point in range(0x110000) if not 0xD800 <= point < 0xE000]
    # Unassigned and private code points are alike: test a sample of them.
    points = [c for c in points if unicodedata.category(c) not in ("Cn", "Co") or ord(c) % 97 == 0]
    around = [f"a{c}b.{c}\u0301 {c}[SEP] 日{c}" for c in points]
    texts = ["".join(around[i : i + 300]) for i in range(0, len(around), 300)]
    assert by_words(bert, texts) == bert.encode_batch(texts)


def test_most_punctuation_is_a_word_by_itself(bert: Tokenizer) -> None:
    rules = bert.word_rules()
    assert rules is not None
    assert rules.kinds.dtype == np.uint8
    assert [int(rules.kinds[ord(c)]) for c in " \t\n\r.[aé"] == [1, 1, 1, 1, 2, 2, 0, 0]
    assert np.count_nonzero(rules.kinds[:128] == 2) == 32  # the length of string.punctuation
    assert np.count_nonzero(rules.kinds == 2) > 600
    assert rules.whole == SPECIAL


@pytest.mark.parametrize("alone", [True, False])
def test_ideographs_are_words_if_the_config_asks_for_it(tmp_path: Path, alone: bool) -> None:
    folder = write_vocabulary(tmp_path / "bert", tokenize_chinese_chars=alone)
    rules = open_tokenizer(folder).word_rules()
    assert rules is not None
    borders = rules.kinds[[0x3400, 0x4DBF, 0x4E00, 0x9FFF]]
    assert borders.tolist() == [2 * alone] * 4
    assert rules.kinds[[0x33FF, 0xA000]].tolist() == [0, 0]


def test_known_words_are_not_encoded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = open_tokenizer(write_vocabulary(tmp_path / "bert"))
    encoded_words: list[str] = []

    def encode_batch(texts: list[str], /, *, workers: int = 1) -> list[list[int]]:
        encoded_words.extend(texts)
        return tokenizer.encode_batch(texts, workers=workers)

    recording = Tokenizer(**{**vars(tokenizer), "encode_batch": encode_batch})
    texts = ["ab, ab. cab", "ab cab\té[SEP]e,"]
    assert by_words(recording, texts) == tokenizer.encode_batch(texts)
    assert encoded_words == ["ab", ",", ".", "cab", "é[SEP]e,"]
    # A full cache is emptied, and its words are encoded again.
    monkeypatch.setattr(tokenize_encoder, "_WORD_CACHE_BYTES", 1)
    del encoded_words[:]
    encoder = Encoder(recording, workers=1)
    for _ in range(2):
        assert encoder(["ab ab"]).ids.tolist() == tokenizer.encode_batch(["ab ab"])[0]
    assert encoded_words == ["ab", "ab"]


def test_many_distinct_words_give_the_same_tokens(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(write_vocabulary(tmp_path / "bert"))
    texts = [" ".join(f"a{number}" for number in range(start, start + 1000))
             for start in range(0, 200_000, 1000)]  # fmt: skip
    assert by_words(tokenizer, texts) == tokenizer.encode_batch(texts)


def rebuilt(change: Callable[[dict[str, Any]], object], folder: Path) -> tokenizers.Tokenizer:
    fast = tokenizers.BertWordPieceTokenizer(str(write_vocabulary(folder) / "vocab.txt"))
    definition = json.loads(fast.to_str())
    change(definition)
    return tokenizers.Tokenizer.from_str(json.dumps(definition))


def template(*pieces: str) -> dict[str, Any]:
    from tokenizers.processors import TemplateProcessing

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.post_processor = TemplateProcessing(
        single=list(pieces), special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    post_processor: dict[str, Any] = json.loads(tokenizer.to_str())["post_processor"]
    return post_processor


def add_token(**settings: Any) -> Callable[[dict[str, Any]], object]:
    token = {
        "id": 200, "content": "[NEW]", "single_word": False, "lstrip": False, "rstrip": False,
        "normalized": False, "special": True, **settings,
    }  # fmt: skip
    return lambda definition: definition["added_tokens"].append(token)


@pytest.mark.parametrize(
    "change",
    [
        add_token(normalized=True),
        add_token(lstrip=True),
        add_token(rstrip=True),
        add_token(content="two words"),
        add_token(content="no\u00a0break"),
        lambda definition: definition.update(normalizer=None),
        lambda definition: definition.update(normalizer={"type": "NFC"}),
        lambda definition: definition.update(pre_tokenizer={"type": "Whitespace"}),
        lambda definition: definition.update(pre_tokenizer=None),
        lambda definition: definition.update(post_processor=template("$A", "$A")),
        lambda definition: definition.update(
            post_processor=json.loads(tokenizers.processors.ByteLevel().__getstate__())
        ),
    ],
)
def test_other_tokenizers_have_no_rules(
    tmp_path: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    assert word_rules(rebuilt(dict.copy, tmp_path)) is not None
    assert word_rules(rebuilt(add_token(single_word=True), tmp_path)) is not None
    bert = template("[CLS]", "$A", "[SEP]")
    assert word_rules(rebuilt(lambda s: s.update(post_processor=bert), tmp_path)) is not None
    assert word_rules(rebuilt(change, tmp_path)) is None


def test_a_tokenizer_json_is_encoded_by_words(tmp_path: Path) -> None:
    fast = rebuilt(add_token(single_word=True), tmp_path / "source")
    fast.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"sep_token": "[SEP]"}')
    tokenizer = open_tokenizer(tmp_path)
    texts = ["ab[NEW] [NEW] [NEW]. [NEW]e [MASK][NEW]", "[NEW", "a[NEW]b [NEW][NEW] .[NEW]"]
    assert by_words(tokenizer, texts) == tokenizer.encode_batch(texts)


def kinds() -> Any:
    table = np.zeros(0x110000, np.uint8)
    table[[ord(" "), ord("\n")]] = 1
    table[[ord(c) for c in "[]<,日"]] = 2
    return table


def test_words_splits_texts_and_combines_tokens() -> None:
    words = _csrc.Words(kinds(), ["<eod>", "x,y"], capacity=1 << 20)
    texts = ["ab, ab\n\n,日本x,", "", " ", "a<eod>b,c <eod", "x,x,y <<eod>", "日"]
    missing = words.split(texts)
    assert missing[:5] == ["ab", ",", "日", "本x", "a<eod>b,c"]
    assert {"a<eod>b,c", "x,x,y", "<<eod>", "eod"} <= set(missing)
    number = {word: i for i, word in enumerate(missing)}
    lengths = np.arange(len(missing), dtype=np.int64) % 3
    ids = np.repeat(np.arange(len(missing), dtype=np.uint32), lengths)
    text_ids, text_lengths = words.finish(ids, lengths)
    text_words = [
        ["ab", ",", "ab", ",", "日", "本x", ","], [], [], ["a<eod>b,c", "<", "eod"],
        ["x,x,y", "<<eod>"], ["日"],
    ]  # fmt: skip
    expected = [[number[w] for w in text for _ in range(number[w] % 3)] for text in text_words]
    assert text_lengths.tolist() == [len(text) for text in expected]
    assert text_ids.tolist() == [token for text in expected for token in text]
    assert words.split(["ab 本x new"]) == ["new"]


def test_words_checks_its_arguments() -> None:
    with pytest.raises(ValueError, match="0x110000"):
        _csrc.Words(kinds()[1:].copy(), [], capacity=1)
    with pytest.raises(ValueError, match="not empty"):
        _csrc.Words(kinds(), [""], capacity=1)
    words = _csrc.Words(kinds(), [], capacity=1 << 20)
    one_length, no_ids = np.ones(1, np.int64), np.zeros(0, np.uint32)
    with pytest.raises(ValueError, match="missing words"):
        words.finish(no_ids, one_length)
    words.split(["a"])
    with pytest.raises(ValueError, match="add up"):
        words.finish(no_ids, one_length)
    with pytest.raises(ValueError, match="add up"):
        words.finish(np.ones(2, np.uint32), one_length)
    with pytest.raises(ValueError, match="add up"):
        words.finish(no_ids, -one_length)
    with pytest.raises(UnicodeEncodeError):
        words.split(["\ud800"])
    # Words of an unfinished call are forgotten.
    assert words.split(["a b"]) == ["a", "b"]
    assert words.split(["b"]) == ["b"]
