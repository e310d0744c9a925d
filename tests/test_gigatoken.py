"""gigatoken is used where it is exact and nowhere else: code points enumerated, texts made up."""

import importlib
import io
import json
import random
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import gigatoken
import numpy as np
import pytest
import sentencepiece
import tokenizers

from tokamake._csrc import find_marked
from tokamake.data.tokenizers import Tokenizer, _code_points, open_tokenizer
from tokamake.data.tokenizers._code_points import differing, encoders, revealing
from tokamake.data.tokenizers._exact import REGEXES, json_refusal, sentencepiece_refusal
from tokamake.data.tokenizers._gigatoken import (
    Gigatoken,
    _stand_in,
    in_parts,
    refusal,
)

Json = dict[str, Any]
MARKED = frozenset(np.flatnonzero(_code_points.table()).tolist())
ASSIGNED_PLANES = [*range(0x40000), *range(0xE0000, 0xE1000)]  # the others hold no character

ATOMS = [
    *("a", "b", "the", "Hello", "WORLD", "iPhone", "1", "23", "4567", "12345678"),
    *(" ", "  ", "    ", "\t", "\n", "\n\n", "\r\n", "\r", "\0", "\x1f", "\x0b", "\x85", "\x7f"),
    *(
        "'s",
        "'S",
        "'ll",
        "'LL",
        "'t",
        "'ſ",
        "'re",
        "'d",
        "'",
        "''",
        ".",
        ",",
        "!!",
        "...",
        "/",
        "_",
    ),
    *("\u00a0", "\u2003", "\u3000", "\u200b", "\u200d", "\ufeff", "\u2028", "\u1680", "\u180e"),
    *(
        "é",
        "e\u0301",
        "ß",
        "İ",
        "ı",
        "Ǆ",
        "ǅ",
        "ʰ",
        "ª",
        "日本",
        "語",
        "한국어",
        "\u1100",
        "\u1161",
    ),
    *("ي", "א", "ॐ", "\u0301", "\u0303\u0301", "\u20dd", "½", "Ⅷ", "٣", "一", "²", "𝟘", "𝐀", "𐐀"),
    *(
        "😀",
        "👩‍👩‍👧",
        "🇹🇷",
        "👍🏽",
        "\ufffd",
        "\uffff",
        "\U0010ffff",
        "\u0378",
        "…",
        "—",
        "“",
        "℃",
        "∑",
    ),
    *(
        "<|endoftext|>",
        "<|endoftext",
        "|>",
        "<s>",
        "</s>",
        "<unk>",
        "<0x0A>",
        "<0x",
        "0A>",
        "[INST]",
    ),
    *("\u2581", "\u2581\u2581", "\u2581a", "ﬁ", "①", "Å", "ｶﾞ", "<", "s>"),
]


def made_up(count: int, seed: int, atoms: list[str] = ATOMS) -> list[str]:
    """Texts of mixed scripts, runs of spaces, contractions, emoji, special tokens, odd bytes."""
    rng = random.Random(seed)

    def character() -> str:
        return chr(
            rng.choice(
                [*map(rng.randrange, (0x80, 0x800, 0xD800)), 0x10000 + rng.randrange(0x20000)]
            )
        )

    texts = []
    for _ in range(count):
        size, way = rng.choice([0, 1, 3, 8, 20, 60]), rng.random()
        if way < 0.75:
            texts.append("".join(rng.choice(atoms) for _ in range(size)))
        elif way < 0.9:
            texts.append("".join(character() for _ in range(size)))
        else:
            texts.append("".join(rng.choice(" \n\r\t'a1.\u3000\u2581") for _ in range(size)))
    return texts


def unmarked(texts: list[str]) -> list[str]:
    """Texts that gigatoken may get; told without `find_marked`."""
    return [text for text in texts if not MARKED & set(map(ord, text))]


def byte_level(regex: str = "", **model: Any) -> Json:
    """tokenizer.json of a byte-level BPE trained on made-up texts."""
    trained = tokenizers.Tokenizer(tokenizers.models.BPE(**model))
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    if regex:
        trained.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
            [
                tokenizers.pre_tokenizers.Split(tokenizers.Regex(regex), "isolated"),
                tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=1500,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(made_up(3000, seed=9), trainer)
    return json.loads(trained.to_str())


@pytest.fixture(scope="module")
def gpt2() -> Json:
    return byte_level()


def sentencepiece_model(**changes: Any) -> bytes:
    settings = {
        "vocab_size": 1200,
        "model_type": "bpe",
        "byte_fallback": True,
        "character_coverage": 0.98,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True,
        "minloglevel": 2,
        "num_threads": 1,
    }
    rng = random.Random(5)
    words = [atom for atom in ATOMS if not {"\n", "\0", ">"} & set(atom)]
    lines = ["".join(rng.choice(words) for _ in range(30)) for _ in range(1500)]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, **(settings | changes)
    )
    return model.getvalue()


def fast_sentencepiece(model: bytes) -> Callable[[list[str]], list[list[int]]]:
    """gigatoken as it is used for a SentencePiece model."""
    tokenizer = Tokenizer(
        vocab_size=1,
        eod=0,
        encode_batch=None,
        decode=str,
        package="sentencepiece",
        definition=lambda: model,
    )
    return lambda texts: rows(*Gigatoken(tokenizer).encode(texts))


def rows(ids: np.ndarray, lengths: np.ndarray) -> list[list[int]]:
    return [part.tolist() for part in np.split(ids, np.cumsum(lengths))[:-1]]


@pytest.mark.parametrize(
    ("name", "points"),
    [("o200k", range(0x110000)), ("GPT-2", ASSIGNED_PLANES), ("Llama-3", ASSIGNED_PLANES)],
)
def test_the_table_holds_exactly_the_code_points_that_differ(name: str, points: list[int]) -> None:
    found = differing(points, *encoders(revealing(REGEXES[name])))
    assert found <= MARKED
    if name == "o200k":
        assert found == MARKED
    else:  # marks are like other signs to expressions that know letters and digits only
        assert len(found) == 4657


@pytest.mark.parametrize("name", REGEXES)
def test_made_up_texts(name: str) -> None:
    texts = unmarked(made_up(4000, seed=1))
    for text in (revealing(REGEXES[name]), json.dumps(byte_level(REGEXES[name]))):
        assert json_refusal(text.encode()) == ""
        reference, fast = encoders(text)
        assert reference(texts) == fast(texts)


def test_an_expression_that_is_not_listed_is_refused(gpt2: Json) -> None:
    # OpenAI's own spelling for GPT-4: quantifiers that the two packages read differently.
    regex = (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|"
        r"\s++$|\s*[\r\n]|\s+(?!\S)|\s+"
    )
    text = json.dumps(byte_level(regex))
    assert "not known to be exact" in json_refusal(text.encode())
    reference, fast = encoders(text)
    assert reference(["4567"]) != fast(["4567"])


def changed(tokenizer: Json, path: str, value: Any) -> Json:
    copy = json.loads(json.dumps(tokenizer))
    *folders, last = path.split("/")
    at = copy
    for folder in folders:
        at = at[folder]
    at[last] = value
    return copy


def added(tokenizer: Json, *tokens: Json) -> Json:
    plain = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": False,
    }
    first = len(tokenizer["model"]["vocab"])
    more = [{"id": first + n, **plain, **token} for n, token in enumerate(tokens)]
    return changed(tokenizer, "added_tokens", tokenizer["added_tokens"] + more)


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
WORDS = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def split(
    behavior: str = "Isolated", invert: bool = False, regex: str = REGEXES["Llama-3"]
) -> Json:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": behavior, "invert": invert}


def sequence(*parts: Json) -> Json:
    return {"type": "Sequence", "pretokenizers": list(parts)}


WRONG = {
    "bytes without words": ("pre_tokenizer", BYTES),
    "no pre-tokenizer": ("pre_tokenizer", None),
    "digits after the split": (
        "pre_tokenizer",
        sequence(split(), {"type": "Digits", "individual_digits": True}, BYTES),
    ),
    "words after the split": ("pre_tokenizer", sequence(split(regex=REGEXES["Qwen-2"]), WORDS)),
    "a space put before": ("pre_tokenizer", sequence(split(), BYTES | {"add_prefix_space": True})),
    "matches removed": ("pre_tokenizer", sequence(split("Removed"), BYTES)),
    "matches joined": ("pre_tokenizer", sequence(split("Contiguous"), BYTES)),
    "split without bytes": ("pre_tokenizer", split()),
    "dropout": ("model/dropout", 0.5),
    "end of word": ("model/end_of_word_suffix", "</w>"),
    "normalizer": ("normalizer", {"type": "NFC"}),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_loads_and_is_wrong_is_refused(gpt2: Json, what: str) -> None:
    text = json.dumps(changed(gpt2, *WRONG[what]))
    assert json_refusal(text.encode())
    reference, fast = encoders(text)
    texts = [*unmarked(made_up(2000, seed=2)), "ab\u0f71\u0f74\u0f72", "\u1e0a\u0323\u0301"]
    assert what in ("normalizer", "words after the split") or reference(texts) != fast(texts)


NOT_WRONG = {
    "split": ("pre_tokenizer", sequence(split(), BYTES)),
    "all else removed": ("pre_tokenizer", sequence(split("Removed", True), BYTES)),
    "ignore_merges": ("model/ignore_merges", True),
    "no dropout": ("model/dropout", 0.0),
    "empty prefix": ("model/continuing_subword_prefix", ""),
    "unknown token": ("model/unk_token", "<|endoftext|>"),
    "truncation": (
        "truncation",
        {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
    ),
}


@pytest.mark.parametrize("what", NOT_WRONG)
def test_what_changes_nothing_is_taken(gpt2: Json, what: str, tmp_path: Path) -> None:
    text = json.dumps(changed(gpt2, *NOT_WRONG[what]))
    assert json_refusal(text.encode()) == ""
    (tmp_path / "tokenizer.json").write_text(text)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    opened = open_tokenizer(tmp_path)
    texts = unmarked(made_up(2000, seed=3))
    assert opened.encode_batch(texts) == rows(*Gigatoken(opened).encode(texts))


def test_order_of_entries_and_merges(gpt2: Json) -> None:
    rng = random.Random(0)
    numbers = [7 + 3 * number for number in range(len(gpt2["model"]["vocab"]))]
    rng.shuffle(numbers)
    vocabulary = dict(zip(gpt2["model"]["vocab"], numbers, strict=True))
    shuffled = changed(gpt2, "model/vocab", vocabulary)
    shuffled["added_tokens"][0]["id"] = vocabulary["<|endoftext|>"]
    splits = [
        (word[:cut], word[cut:])
        for word in vocabulary
        for cut in range(1, len(word))
        if word[:cut] in vocabulary and word[cut:] in vocabulary
    ]
    rng.shuffle(splits)
    texts = unmarked(made_up(3000, seed=4))
    for tokenizer in (shuffled, changed(shuffled, "model/merges", splits)):
        assert json_refusal(json.dumps(tokenizer).encode()) == ""
        reference, fast = encoders(json.dumps(tokenizer))
        assert reference(texts) == fast(texts)


@pytest.mark.parametrize(
    ("tokens", "wrong"),
    [
        ([{"content": "<a>"}, {"content": "<b>", "special": True}], False),
        ([{"content": "<a>", "normalized": True}, {"content": "<b>", "normalized": True}], False),
        ([{"content": "<a>"}, {"content": "<a>b"}, {"content": "<a"}, {"content": "a>b"}], False),
        ([{"content": "xyzw"}, {"content": "xyz"}, {"content": "yzwv"}, {"content": "xy"}], False),
        ([{"content": "  "}, {"content": "   "}, {"content": "\n\n"}, {"content": " a"}], False),
        ([{"content": "éa"}, {"content": "<日本>"}, {"content": "\u0301x"}], False),
        ([{"content": "é"}], True),  # in the vocabulary it stands for a byte
        ([{"content": "<q>", "normalized": True}, {"content": "[w]"}], False),
        ([{"content": "foo", "single_word": True}], True),
        ([{"content": "<a>", "lstrip": True}], None),
        ([{"content": "<a>", "rstrip": True}], None),
        ([{"content": "ab", "normalized": True}, {"content": "bc"}], True),
        ([{"content": "abc", "normalized": True}, {"content": "b"}], True),
    ],
    ids=lambda value: " ".join(t["content"] for t in value) if isinstance(value, list) else "",
)
def test_added_tokens(gpt2: Json, tokens: list[Json], wrong: bool | None) -> None:
    """`wrong`: gigatoken differs; None: it was not found to, but is refused."""
    text = json.dumps(added(gpt2, *tokens))
    contents = [token["content"] for token in tokens]
    pieces = [part for c in contents for part in (c, c[: len(c) // 2], c[1:])]
    texts = made_up(3000, seed=6, atoms=[*pieces, "a", " ", "b", "\n", "x", "é"])
    reference, fast = encoders(text)
    texts = unmarked(texts)
    assert bool(json_refusal(text.encode())) == (wrong is not False)
    assert (reference(texts) != fast(texts)) == bool(wrong)


def test_numbers_of_added_tokens(gpt2: Json, tmp_path: Path) -> None:
    """`tokenizers` numbers them as it likes, whatever tokenizer.json says."""
    tokens = [{"content": "é"}, {"content": "<a>", "id": 9000}, {"content": "<b>", "id": 8000}]
    (tmp_path / "tokenizer.json").write_text(json.dumps(added(gpt2, *tokens)))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    opened = open_tokenizer(tmp_path)
    assert refusal(opened) == ""
    texts = unmarked(made_up(1000, seed=13, atoms=["é", "<a>", "<b>", "x", " "]))
    assert opened.encode_batch(texts) == rows(*Gigatoken(opened).encode(texts))


PIECES: Json = {"type": "Prepend", "prepend": "\u2581"}
SPACES: Json = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}


@pytest.mark.parametrize(
    ("normalizer", "pre_tokenizer", "taken"),
    [
        ({"type": "Sequence", "normalizers": [PIECES, SPACES]}, None, True),
        (SPACES, None, True),
        *(
            (
                None,
                {
                    "type": "Metaspace",
                    "replacement": "\u2581",
                    "prepend_scheme": how,
                    "split": False,
                },
                True,
            )
            for how in ("first", "always", "never")
        ),
        (
            None,
            {
                "type": "Metaspace",
                "replacement": "\u2581",
                "prepend_scheme": "first",
                "split": True,
            },
            False,
        ),
        ({"type": "NFKC"}, None, False),
        (PIECES, None, False),
    ],
    ids=str,
)
def test_sentencepiece_like_tokenizer_json(
    normalizer: Json | None, pre_tokenizer: Json | None, taken: bool
) -> None:
    from gigatoken._load.sentencepiece import sentencepiece_to_tokenizer_json

    tokenizer = json.loads(sentencepiece_to_tokenizer_json(sentencepiece_model()))
    tokenizer |= {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer}
    text = json.dumps(tokenizer)
    assert (json_refusal(text.encode()) == "") == taken
    if taken:
        reference, fast = encoders(text)
        texts = made_up(3000, seed=7)
        assert reference(texts) == fast(texts)


def test_other_models_are_refused() -> None:
    for model in ({"type": "WordPiece"}, {"type": "Unigram"}, {}):
        assert "type" in json_refusal(json.dumps({"model": model}).encode())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"add_dummy_prefix": False},
        {"split_by_whitespace": False, "split_by_unicode_script": False, "split_digits": True},
        {"control_symbols": ["<ctl>", "the"], "unk_piece": "foo", "bos_id": -1},
    ],
    ids=str,
)
def test_sentencepiece(changes: Json) -> None:
    model = sentencepiece_model(**changes)
    assert sentencepiece_refusal(model) == ""
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    runs = ["".join(runs) for size in range(1, 7) for runs in product("ab \u2581", repeat=size)]
    texts = [*made_up(5000, seed=8), *runs, *(" " * n + "a" for n in range(80))]
    assert processor.encode(texts, num_threads=1) == fast_sentencepiece(model)(texts)


def test_sentencepiece_takes_every_code_point() -> None:
    model = sentencepiece_model()
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    fast = fast_sentencepiece(model)
    characters = [chr(point) for point in range(0x110000) if not 0xD800 <= point < 0xE000]
    texts = [
        "".join(f"a{c}b {c} {c}{c}" for c in characters[start : start + 256])
        for start in range(0, len(characters), 256)
    ]
    assert processor.encode(texts, num_threads=2) == fast(texts)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "unigram"}, "it is a unigram model"),
        ({"byte_fallback": False}, "it has no byte_fallback"),
        ({"normalization_rule_name": "nmt_nfkc"}, "it normalizes text"),
        ({"remove_extra_whitespaces": True}, "it removes extra whitespace"),
        ({"treat_whitespace_as_suffix": True}, "it marks spaces in another way"),
        ({"user_defined_symbols": ["<q>"]}, "it has user-defined or unused pieces"),
    ],
    ids=str,
)
def test_sentencepiece_models_that_are_refused(changes: Json, reason: str) -> None:
    assert sentencepiece_refusal(sentencepiece_model(**changes)) == reason


def test_sentencepiece_pieces_that_are_refused() -> None:
    def piece(text: str, score: float, kind: int = 1) -> bytes:
        number = np.float32(score).tobytes()
        inner = b"\x0a" + bytes([len(text.encode())]) + text.encode() + b"\x15" + number
        inner += bytes([3 << 3, kind])
        return b"\x0a" + bytes([len(inner)]) + inner

    model = sentencepiece_model()
    spaces = b"".join(piece("\u2581" * size, -1e9) for size in (20, 21, 22))  # as Llama-2 has them
    assert sentencepiece_refusal(model + spaces) == ""
    texts = [" " * size + end for size in range(100) for end in ("", "a")]
    processor = sentencepiece.SentencePieceProcessor(model_proto=model + spaces)
    assert processor.encode(texts, num_threads=1) == fast_sentencepiece(model + spaces)(texts)
    alike = piece("qzqz", -7e8) + piece("zqzq", -7e8)
    assert sentencepiece_refusal(model + alike) == "two of its pieces have the same score"
    spelt = piece("</", -7e8) + piece("s>", -8e8)
    assert sentencepiece_refusal(model + spelt) == "its pieces spell out a special piece"


def test_other_versions_turn_it_off(sampled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = open_tokenizer(sampled / "tokenizer")
    assert refusal(opened) == ""
    monkeypatch.setitem(_code_points.VERSIONS, "tokenizers", "0.1")
    assert "python -m tokamake.data.tokenizers._code_points" in refusal(opened)
    monkeypatch.setitem(_code_points.VERSIONS, "nonexistent-package", "1")
    monkeypatch.delitem(_code_points.VERSIONS, "tokenizers")
    assert refusal(opened) == "nonexistent-package is not installed"


def test_caches_are_thrown_away(sampled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = open_tokenizer(sampled / "tokenizer")
    loads: list[bytes] = []
    load = gigatoken.Tokenizer.from_json
    monkeypatch.setattr(
        gigatoken.Tokenizer, "from_json", lambda text: loads.append(text) or load(text)
    )
    texts = unmarked(made_up(500, seed=10))
    patient, thrifty = (
        Gigatoken(opened),
        Gigatoken(opened, budget=-(10**12)),
    )
    for _ in range(3):
        assert (
            rows(*patient.encode(texts))
            == rows(*thrifty.encode(texts))
            == opened.encode_batch(texts)
        )
    assert len(loads) == 2 + 3


def test_the_real_awkward_serves_too(sampled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = open_tokenizer(sampled / "tokenizer")
    texts = ["", *unmarked(made_up(50, seed=14)), ""]
    if not hasattr(sys.modules.get("awkward"), "num"):
        monkeypatch.delitem(sys.modules, "awkward", raising=False)
        importlib.import_module("awkward")
    by_the_real = rows(*Gigatoken(opened).encode(texts))
    monkeypatch.setitem(sys.modules, "awkward", _stand_in())
    assert rows(*Gigatoken(opened).encode(texts)) == by_the_real == opened.encode_batch(texts)


GROWTH = """
import sys
from pathlib import Path
from tokamake.data.tokenizers import open_tokenizer
from tokamake.data.tokenizers._gigatoken import Gigatoken, _resident_bytes, _trim
words = " ".join(f"{number:07}" for number in range(400_000))
loaded = Gigatoken(open_tokenizer(Path(sys.argv[1])))
loaded.encode([words[:1000]])
_trim()
before = _resident_bytes()
loaded.encode([words])
_trim()
print(_resident_bytes() - before)
"""


def test_cache_has_room_from_the_beginning(sampled: Path) -> None:
    command = [sys.executable, "-c", GROWTH, str(sampled / "tokenizer")]
    growth = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert growth < 15_000_000  # a cache that doubles as it fills takes 29 MB


def test_parts() -> None:
    assert list(in_parts(["aa", "b", "cccc", "", "d"], 3)) == [["aa", "b"], ["cccc"], ["", "d"]]
    assert list(in_parts(["", ""], 3)) == [["", ""]]
    assert list(in_parts([], 3)) == []


def test_find_marked() -> None:
    table = _code_points.table()
    texts = [
        "", "ascii" * 30, "é" * 100, "日本語" * 50, "x" * 200 + "\u088f", "\u0c5c" + "😀" * 70,
        "😀" * 64 + "\U000323b0" + "a" * 3, "\U00033479", "\U0003347a", "\U0010ffff",
    ]  # fmt: skip
    assert find_marked(texts, table).tolist() == [4, 5, 6, 7]
    rng = random.Random(0)
    texts = made_up(2000, seed=11) + [
        text + chr(rng.choice(sorted(MARKED))) for text in made_up(500, seed=12)
    ]
    rng.shuffle(texts)
    wanted = [number for number, text in enumerate(texts) if MARKED & set(map(ord, text))]
    assert find_marked(texts, table).tolist() == wanted
    assert len(wanted) >= 500
    with pytest.raises(TypeError, match="texts are strings"):
        find_marked(["a", b"b"], table)
    with pytest.raises(ValueError, match="0x110000"):
        find_marked(["a"], table[:-1])
    with pytest.raises(ValueError, match="below 256"):
        find_marked(["a"], np.ones(0x110000, np.uint8))
