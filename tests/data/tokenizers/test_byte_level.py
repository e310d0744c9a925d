"""Byte-level BPE in lib/csrc gives the tokens of the `tokenizers` package for all texts."""

import base64
import itertools
import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers

from tests.support.paths import ROOT
from tests.support.tokenizer_texts import (
    ASSIGNED_POINTS,
    BYTES,
    REGEXES,
    Json,
    added,
    byte_level,
    changed,
    differing_points,
    probe_tokenizer,
    random_texts,
    rows,
    sequence,
    shuffled,
    split,
)
from tokamake.data.tokenizers import Tokenizer
from tokamake.data.tokenizers._byte_level import GPT2
from tokamake.data.tokenizers._fast import wrap
from tokamake.data.tokenizers._fast_encoder import FastEncoder, refusal

Encode = Callable[[list[str]], list[list[int]]]
PREFIXED = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
WORDS = PREFIXED | {"add_prefix_space": False}
NOTHING = {"type": "Sequence", "normalizers": []}
CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|"
    r"\s++$|\s*[\r\n]|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+|"
    " ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)
PATTERNS = {**REGEXES, "DeepSeek": DEEPSEEK}
AS_SPLIT = sequence(split(regex=REGEXES["GPT-2"]), BYTES)
SIGNS = [
    *("a", "s", "re", "LL", "1", "½", "!", "'", " ", "\n"),
    "\u3000",
    "\u00a0",
    "é",
    "日",
    "\U0001f600",
]


@pytest.fixture(scope="module")
def gpt2() -> Json:
    return byte_level()


def encoders(definition: Json | str) -> tuple[Encode, Encode]:
    """Load a tokenizer.json with the `tokenizers` package and with lib/csrc."""
    text = definition if isinstance(definition, str) else json.dumps(definition)
    package = tokenizers.Tokenizer.from_str(text)
    end = next(iter(package.get_vocab(with_added_tokens=True)))
    tokenizer = wrap(package, [Path("tokenizer.json")], defaults={"eos_token": end})
    assert refusal(tokenizer) == ""
    encoder = FastEncoder(tokenizer)
    return tokenizer.encode_batch, lambda texts: rows(*encoder.encode(texts))


@pytest.mark.grid
@pytest.mark.parametrize("name", PATTERNS)
def test_every_assigned_code_point_gives_the_same_tokens(name: str) -> None:
    assert differing_points(ASSIGNED_POINTS, encoders(probe_tokenizer(PATTERNS[name]))) == set()


@pytest.mark.parametrize(
    "pre_tokenizer", [None, PREFIXED, AS_SPLIT], ids=["plain", "prefix", "split"]
)
@pytest.mark.parametrize("tokens", [[], ["<a>", "<a>b", "a b"], [" ", "\n\n", "é"]], ids=str)
def test_random_texts_give_the_same_tokens(
    gpt2: Json, pre_tokenizer: Json | None, tokens: list[str], times: int
) -> None:
    definition = added(gpt2, *({"content": token} for token in tokens if token != "é"))
    if pre_tokenizer:
        definition = changed(definition, "pre_tokenizer", pre_tokenizer)
    reference, encode = encoders(definition)
    texts = random_texts(1500 * times, seed=1)
    texts += random_texts(500 * times, seed=2, atoms=[*tokens, *SIGNS, "<a", "a> b", "b"])
    assert encode(texts) == reference(texts)


def test_added_tokens_take_white_space_along(gpt2: Json, times: int) -> None:
    tokens: list[Json] = [
        {"content": "<a>", "lstrip": True},
        {"content": "<b>", "lstrip": True, "rstrip": True},
        {"content": "<a>b", "rstrip": True},
        {"content": "[c]", "normalized": True, "lstrip": True, "rstrip": True},
        {"content": "é", "single_word": True},
        {"content": "<b", "single_word": True, "normalized": True},
    ]
    texts = ["<a>", "<b>", "[c]", "b", "<", " ", " ", "\n", "\t", "é"]
    texts += [*"\x1c\x1f\x85\xa0\u1680\u180e\u2003\u200b\u2029\u202f\u205f\u3000"]
    reference, encode = encoders(added(changed(gpt2, "normalizer", {"type": "NFC"}), *tokens))
    texts = random_texts(3000 * times, seed=3, atoms=texts)
    assert encode(texts) == reference(texts)


def test_all_texts_of_up_to_four_characters_give_the_same_tokens(gpt2: Json) -> None:
    reference, encode = encoders(gpt2)
    texts = ["".join(signs) for size in range(5) for signs in itertools.product(SIGNS, repeat=size)]
    assert encode(texts) == reference(texts)


@pytest.mark.parametrize("filler", ["x", " ", "é", "\u3000", "'"])
def test_words_across_block_borders_give_the_same_tokens(gpt2: Json, filler: str) -> None:
    reference, encode = encoders(gpt2)
    rng = random.Random(3)
    texts = [
        filler * before + "".join(rng.choices(SIGNS, k=6)) + filler * after
        for before in range(50, 140)
        for after in (0, 1, 64)
    ]
    assert encode(texts) == reference(texts)


def test_contractions_give_the_same_tokens(gpt2: Json) -> None:
    reference, encode = encoders(gpt2)
    ends = ["s", "t", "re", "ve", "m", "ll", "d", "S", "r", "l", "v", "", "é"]
    around = ["", " ", "a", "1", "'", "\n", "!"]
    texts = [f"{a}'{end}{b}" for a in around for end in ends for b in [*around, "'s", "'ll'd"]]
    assert encode(texts) == reference(texts)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("x" * 5_000_000, marks=pytest.mark.grid),
        pytest.param(" " * 5_000_000, marks=pytest.mark.grid),
        *("\n" * 70_000 + "x", "ab" * 40_000 + " " * 65, "é" * 99_999),
    ],
)
def test_long_words_give_the_same_tokens(gpt2: Json, text: str) -> None:
    reference, encode = encoders(gpt2)
    assert encode([text, "", "a " + text]) == reference([text, "", "a " + text])


def test_any_order_of_ids_and_merges_gives_the_same_tokens(gpt2: Json) -> None:
    _, definition = shuffled(gpt2)
    reference, encode = encoders(definition)
    texts = [*random_texts(3000, seed=4), "the" * 100, "0" * 65 + "\n" * 64]
    assert encode(texts) == reference(texts)


def random_text(size: int, seed: int) -> str:
    text = base64.b64encode(random.Random(seed).randbytes(size * 3 // 4)).decode()
    return "".join(text[start : start + 70] + "\n" for start in range(0, len(text), 70))


def test_a_full_word_cache_does_not_change_tokens(gpt2: Json) -> None:
    reference, encode = encoders(gpt2)
    for size in (20_000, 4_000_000, 20_000):  # the second fills the word cache many times
        assert len(encode([random_text(size, seed=size)])[0]) > size // 4
    texts = [random_text(200_000, seed=seed) for seed in range(5)]
    assert encode(texts) == reference(texts)


GROWTH = """
import ctypes
import os
import sys
from pathlib import Path
from tests.data.tokenizers.test_byte_level import random_text
from tokamake.data.tokenizers import open_tokenizer
from tokamake.data.tokenizers._fast_encoder import FastEncoder

def resident_bytes():
    ctypes.CDLL(None).malloc_trim(0)
    _, resident, shared = map(int, Path("/proc/self/statm").read_text().split()[:3])
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")

encoder = FastEncoder(open_tokenizer(Path(sys.argv[1])))
sizes = []
for seed in range(12):
    encoder.encode([random_text(2_000_000, seed)])
    sizes.append(resident_bytes())
print(sizes[-1] - sizes[3])
"""


def test_memory_does_not_grow_with_the_number_of_words(sampled: Path) -> None:
    command = [sys.executable, "-c", GROWTH, str(sampled / "tokenizer")]
    process = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    assert int(process.stdout) < 8_000_000


EXACT = {
    "GPT-2 of words": (WORDS | {"use_regex": True}, split(regex="[a-z]+")),
    "Llama-3": (split(), BYTES),
    "Qwen-2": (split(regex=REGEXES["Qwen-2"]), BYTES),
    "o200k": (split("Removed", True, regex=REGEXES["o200k"]), BYTES),
    "Tekken": (split(regex=REGEXES["Nemotron"]), BYTES),
    "OpenAI's own cl100k": (split(regex=CL100K), BYTES),
    "DeepSeek-V3": (
        split(regex=r"\p{N}{1,3}"),
        split(regex="[一-龥぀-ゟ゠-ヿ]+"),
        split(regex=DEEPSEEK),
        BYTES,
    ),
    "DeepSeek-LLM": (
        split(regex="[\r\n]"),
        split(regex=r"\s?[A-Za-zµÀ-ÖØ-öø-ƺ]+"),
        split(regex=r"\s?[!-/:-~！-／：-～‘-‟　-。]+"),
        split(regex=r"\s+$"),
        {"type": "Digits", "individual_digits": True},
        BYTES,
    ),
    "StarCoder": ({"type": "Digits", "individual_digits": True}, WORDS),
    "Falcon": (
        {"type": "Punctuation", "behavior": "Contiguous"},
        WORDS,
        {"type": "Digits", "individual_digits": False},
        split(regex="[0-9][0-9][0-9]"),
    ),
    "BLOOM": (split(regex=" ?[^(\\s|[.,!?…。，、।۔،])]+"), BYTES),
    "punctuation alone": ({"type": "Punctuation", "behavior": "Isolated"}, BYTES),
    "bytes without words": (BYTES,),
    "words of words": (split(regex=REGEXES["Qwen-2"]), WORDS),
    "matches removed": (split("Removed"), BYTES),
    "text between matches": (split(regex=r"\p{L}+|[^\s\p{L}]"), BYTES),
    "text between matches removed": (split("Removed", True, regex=r"\p{L}+|[^\s\p{L}]"), BYTES),
    "long matches that fail": (split(regex=r"[a\s]+1|a|\s|[^a\s]+"), BYTES),
}


@pytest.mark.parametrize("name", EXACT)
def test_every_pre_tokenizer_gives_the_same_tokens(gpt2: Json, name: str, times: int) -> None:
    definition = changed(gpt2, "pre_tokenizer", sequence(*EXACT[name]))
    reference, encode = encoders(definition)
    texts = random_texts(700 * times, seed=5)
    texts += random_texts(400 * times, seed=6, atoms=SIGNS)
    texts += ["a" * 700, "a \n" * 300 + "1", (" a" * 90 + "b") * 5]
    expected = reference(texts)
    assert encode(texts) == expected
    assert encode(texts) == expected  # from the cache


NORMALIZERS = {
    **{form: [{"type": form}] for form in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Nmt")},
    "NFKC, lower case": [{"type": "NFKC"}, {"type": "Lowercase"}],
    "lower case, NFC": [{"type": "Lowercase"}, {"type": "NFC"}],
    "without accents": [{"type": step} for step in ("NFD", "Lowercase", "StripAccents")],
    "replaced": [{"type": "Replace", "pattern": {"String": "a"}, "content": "é>"}],
}


@pytest.mark.parametrize("name", NORMALIZERS)
def test_normalized_texts_give_the_same_tokens(gpt2: Json, name: str, times: int) -> None:
    tokens = [
        {"content": "<é>"},
        {"content": ">a", "normalized": True},
        {"content": "é"[:1] + "\u0301"},
    ]
    tokens = [token for token in tokens if token["content"] != "é"]
    definition = changed(
        added(gpt2, *tokens), "normalizer", {"type": "Sequence", "normalizers": NORMALIZERS[name]}
    )
    reference, encode = encoders(definition)
    marks = [
        *"a>é<é>",
        "\u0301",
        "\u0327",
        "\u0345",
        "\u1100",
        "\u1161",
        "\u11a8",
        "각",
        "\uff76",
        "\uff9e",
    ]
    texts = random_texts(500 * times, seed=7)
    texts += random_texts(700 * times, seed=8, atoms=[*marks, "ﬁ", "Å", "<e\u0301>"])
    assert encode(texts) == reference(texts)


def test_all_code_points_are_normalized_alike() -> None:
    definition = changed(json.loads(probe_tokenizer(GPT2)), "normalizer", {"type": "NFC"})
    reference, encode = encoders(definition)
    points = [point for point in range(0x30000) if not 0xD800 <= point < 0xE000]
    texts = [
        "".join(f"e{chr(c)}\u0323{chr(c)}" for c in points[start : start + 256])
        for start in range(0, len(points), 256)
    ]
    assert encode(texts) == reference(texts)


def test_words_of_the_vocabulary_need_no_merges(gpt2: Json) -> None:
    definition = changed(gpt2, "model/ignore_merges", True)
    definition["model"]["merges"] = definition["model"]["merges"][::2]
    reference, encode = encoders(definition)
    texts = random_texts(3000, seed=9)
    assert encode(texts) == reference(texts)
    assert encode(texts) != encoders(changed(definition, "model/ignore_merges", False))[1](texts)


def test_many_added_tokens_of_two_kinds_give_the_same_tokens(gpt2: Json) -> None:
    tokens = [{"content": f"<{number}>"} for number in range(1000)]
    tokens += [{"content": text, "normalized": True} for text in ("1>", "<", "><", "  ")]
    reference, encode = encoders(changed(added(gpt2, *tokens), "normalizer", NOTHING))
    texts = random_texts(2000, seed=10, atoms=["<", "1", "2", ">", "<12>", " ", "a"])
    assert encode(texts) == reference(texts)


REFUSED = {
    "dropout": ("model/dropout", 0.5),
    "end of word": ("model/end_of_word_suffix", "</w>"),
    "normalizer": ("normalizer", {"type": "Strip", "strip_left": True, "strip_right": True}),
    "look behind": ("pre_tokenizer", sequence(split(regex=r"(?<=a)b"), BYTES)),
    "a lazy quantifier": ("pre_tokenizer", sequence(split(regex="a+?"), BYTES)),
    "a possessive quantifier": ("pre_tokenizer", sequence(split(regex=r"(?:ab)++"), BYTES)),
    "an empty match": ("pre_tokenizer", sequence(split(regex=r"\s*"), BYTES)),
    "case in a class": ("pre_tokenizer", sequence(split(regex="(?i:[^ab])"), BYTES)),
    "ligatures": ("pre_tokenizer", sequence(split(regex="(?i:ss)"), BYTES)),
    "matches joined": ("pre_tokenizer", sequence(split("Contiguous"), BYTES)),
    "a prefix for each word": (
        "pre_tokenizer",
        sequence(split(), BYTES | {"add_prefix_space": True}),
    ),
    "no pre-tokenizer": ("pre_tokenizer", None),
    "split without bytes": ("pre_tokenizer", split()),
}


def reason(definition: Json) -> str:
    text = json.dumps(definition).encode()
    return refusal(
        Tokenizer(
            vocab_size=1,
            eod=0,
            encode_batch=None,
            decode=str,
            package="tokenizers",
            definition=lambda: text,
        )
    )


@pytest.mark.parametrize("change", REFUSED)
def test_tokenizers_not_known_to_be_exact_are_refused(gpt2: Json, change: str) -> None:
    assert reason(gpt2) == ""
    assert reason(changed(gpt2, *REFUSED[change])) != ""


def test_added_tokens_and_vocabularies_that_are_not_exact_are_refused(gpt2: Json) -> None:
    stripped = added(gpt2, {"content": "<a>", "rstrip": True}, {"content": " "})
    assert "has rstrip" in reason(stripped)
    assert "another number" in reason(added(gpt2, {"content": "a"}))
    vocabulary = dict(gpt2["model"]["vocab"])
    del vocabulary["Ā"]
    without_merges = changed(gpt2, "model/merges", [])
    assert "a byte is not" in reason(changed(without_merges, "model/vocab", vocabulary))
