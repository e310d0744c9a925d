"""Byte-level BPE of lib/csrc gives the tokens of the `tokenizers` package for all texts."""

import base64
import itertools
import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tokenizers

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
)
from tests.support.paths import ROOT
from tokamake._csrc import ByteLevel
from tokamake.data.tokenizers import _byte_level, open_tokenizer
from tokamake.data.tokenizers._byte_level import ByteLevelEncoder, refusal
from tokamake.data.tokenizers._exactness import REGEXES, byte_level_refusal
from tokamake.data.tokenizers._fast import wrap
from tokamake.data.tokenizers._unicode_differences import differing_points, probe_tokenizer

Encode = Callable[[list[str]], list[list[int]]]
PREFIXED = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
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
    encoder = ByteLevelEncoder(tokenizer)
    return tokenizer.encode_batch, lambda texts: rows(*encoder.encode(texts))


def testbyte_level_match_the_installed_package() -> None:
    assert np.array_equal(_byte_level.character_classes(), _byte_level.installed_classes())


@pytest.mark.grid
def test_every_assigned_code_point_gives_the_same_tokens() -> None:
    points = [*range(0x40000), *range(0xE0000, 0xE1000), *range(0x10FF00, 0x110000)]
    assert differing_points(points, encoders(probe_tokenizer(REGEXES["GPT-2"]))) == set()


@pytest.mark.parametrize(
    "pre_tokenizer", [None, PREFIXED, AS_SPLIT], ids=["plain", "prefix", "split"]
)
@pytest.mark.parametrize("tokens", [[], ["<a>", "<a>b", "a b"], [" ", "\n\n", "é"]], ids=str)
def test_random_texts_give_the_same_tokens(
    gpt2: Json, pre_tokenizer: Json | None, tokens: list[str]
) -> None:
    definition = added(gpt2, *({"content": token} for token in tokens if token != "é"))
    if pre_tokenizer:
        definition = changed(definition, "pre_tokenizer", pre_tokenizer)
    reference, encode = encoders(definition)
    texts = random_texts(4000, seed=1)
    texts += random_texts(1000, seed=2, atoms=[*tokens, *SIGNS, "<a", "a> b", "b"])
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
import sys
from pathlib import Path
from tests.data.tokenizers.test_byte_level import random_text
from tokamake.data.tokenizers import open_tokenizer
from tokamake.data.tokenizers._byte_level import ByteLevelEncoder
from tokamake.data.tokenizers._gigatoken import _resident_bytes, _trim
encoder = ByteLevelEncoder(open_tokenizer(Path(sys.argv[1])))
sizes = []
for seed in range(12):
    encoder.encode([random_text(2_000_000, seed)])
    _trim()
    sizes.append(_resident_bytes())
print(sizes[-1] - sizes[3])
"""


def test_memory_does_not_grow_with_the_number_of_words(sampled: Path) -> None:
    command = [sys.executable, "-c", GROWTH, str(sampled / "tokenizer")]
    process = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    assert int(process.stdout) < 8_000_000


REFUSED = {
    "dropout": ("model/dropout", 0.5),
    "normalizer": ("normalizer", {"type": "NFC"}),
    "ignore_merges": ("model/ignore_merges", True),
    "byte_fallback": ("model/byte_fallback", True),
    "another expression": ("pre_tokenizer", sequence(split(), BYTES)),
    "bytes without words": ("pre_tokenizer", BYTES),
    "a prefix for each word": (
        "pre_tokenizer",
        sequence(split(regex=REGEXES["GPT-2"]), BYTES | {"add_prefix_space": True}),
    ),
    "matches removed": ("pre_tokenizer", sequence(split("Removed", regex=REGEXES["GPT-2"]), BYTES)),
    "no pre-tokenizer": ("pre_tokenizer", None),
}


@pytest.mark.parametrize("change", REFUSED)
def test_tokenizers_not_known_to_be_exact_are_refused(gpt2: Json, change: str) -> None:
    assert byte_level_refusal(json.dumps(gpt2).encode()) == ""
    assert byte_level_refusal(json.dumps(changed(gpt2, *REFUSED[change])).encode())


def test_added_tokens_and_vocabularies_that_are_not_exact_are_refused(gpt2: Json) -> None:
    def reason(definition: Json) -> str:
        return byte_level_refusal(json.dumps(definition).encode())

    assert "has lstrip" in reason(added(gpt2, {"content": "<a>", "lstrip": True}))
    assert "another number" in reason(added(gpt2, {"content": "a"}))
    assert "many added" in reason(added(gpt2, *({"content": f"<{n}>"} for n in range(101))))
    vocabulary = dict(gpt2["model"]["vocab"])
    del vocabulary["Ā"]
    assert "a byte is not" in reason(changed(gpt2, "model/vocab", vocabulary))


def test_another_version_of_tokenizers_is_refused(
    sampled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = open_tokenizer(sampled / "tokenizer")
    assert refusal(tokenizer) == ""
    monkeypatch.setattr(_byte_level, "VERSION", "0.1")
    assert "may classify characters in another way" in refusal(tokenizer)


def test_byte_level_checks_its_arguments() -> None:
    classes, singles = _byte_level.character_classes(), np.arange(256, dtype=np.uint32)
    no_merges = np.empty((0, 3), np.uint32)

    def make(
        classes: np.ndarray = classes,
        singles: np.ndarray = singles,
        merges: np.ndarray = no_merges,
        added: tuple[tuple[str, int], ...] = (),
    ) -> ByteLevel:
        return ByteLevel(classes, singles, merges, added=list(added), add_prefix_space=False)

    assert make().encode(["aé", "", "\0"])[0].tolist() == [97, 195, 169, 0]
    with pytest.raises(ValueError, match="0x110000"):
        make(classes=classes[:-1])
    with pytest.raises(ValueError, match="ASCII"):
        make(classes=np.zeros_like(classes))
    with pytest.raises(ValueError, match="0 to 3"):
        make(classes=np.where(np.arange(0x110000) < 128, classes, np.uint8(4)))
    with pytest.raises(ValueError, match="256 bytes"):
        make(singles=singles[1:])
    with pytest.raises(ValueError, match="three columns"):
        make(merges=no_merges.reshape(0, 2))
    with pytest.raises(ValueError, match="same pair"):
        make(merges=np.array([[1, 2, 256], [1, 2, 257]], np.uint32))
    for merge in ([1, 2, 2**21], [2**32 - 1, 2, 3]):
        with pytest.raises(ValueError, match="21 bits"):
            make(merges=np.array([merge], np.uint32))
    with pytest.raises(ValueError, match="not empty"):
        make(added=(("", 1),))
    with pytest.raises(TypeError):
        make(singles=singles.astype(np.int64))
    with pytest.raises(UnicodeEncodeError):
        make().encode(["\ud800"])
