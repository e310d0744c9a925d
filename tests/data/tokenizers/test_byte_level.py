"""Our byte-level BPE gives the tokens of the `tokenizers` package, whatever the text."""

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

from tests.data.tokenizers.test_gigatoken_json import BYTES, added, sequence, split
from tests.support.gigatoken_texts import Json, byte_level, changed, made_up, rows
from tests.support.paths import ROOT
from tokamake._csrc import ByteLevel
from tokamake.data.tokenizers import _character_classes, open_tokenizer
from tokamake.data.tokenizers._byte_level import ByteLevelEncoder, refusal
from tokamake.data.tokenizers._exactness import REGEXES, byte_level_refusal
from tokamake.data.tokenizers._fast import wrap
from tokamake.data.tokenizers._unicode_differences import differing, revealing

Encode = Callable[[list[str]], list[list[int]]]
PREFIXED = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
AS_SPLIT = sequence(split(regex=REGEXES["GPT-2"]), BYTES)
SIGNS = [
    "a",
    "s",
    "re",
    "LL",
    "1",
    "½",
    "!",
    "'",
    " ",
    "\n",
    "\u3000",
    "\u00a0",
    "é",
    "日",
    "\U0001f600",
]


@pytest.fixture(scope="module")
def gpt2() -> Json:
    return byte_level()


def encoders(stated: Json | str) -> tuple[Encode, Encode]:
    """The package and ours for a tokenizer.json."""
    text = stated if isinstance(stated, str) else json.dumps(stated)
    package = tokenizers.Tokenizer.from_str(text)
    end = next(iter(package.get_vocab(with_added_tokens=True)))
    opened = wrap(package, Path("tokenizer.json"), eos=end)
    assert refusal(opened) == ""
    ours = ByteLevelEncoder(opened)
    return opened.encode_batch, lambda texts: rows(*ours.encode(texts))


def test_classes_are_those_of_the_package() -> None:
    assert np.array_equal(_character_classes.table(), _character_classes.asked())


def test_every_assigned_code_point_in_context() -> None:
    points = [*range(0x40000), *range(0xE0000, 0xE1000), *range(0x10FF00, 0x110000)]
    assert differing(points, *encoders(revealing(REGEXES["GPT-2"]))) == set()


@pytest.mark.parametrize(
    "pre_tokenizer", [None, PREFIXED, AS_SPLIT], ids=["plain", "prefix", "split"]
)
@pytest.mark.parametrize("tokens", [[], ["<a>", "<a>b", "a b"], [" ", "\n\n", "é"]], ids=str)
def test_made_up_texts(gpt2: Json, pre_tokenizer: Json | None, tokens: list[str]) -> None:
    stated = added(gpt2, *({"content": token} for token in tokens if token != "é"))
    if pre_tokenizer:
        stated = changed(stated, "pre_tokenizer", pre_tokenizer)
    package, ours = encoders(stated)
    texts = made_up(4000, seed=1)
    texts += made_up(1000, seed=2, atoms=[*tokens, *SIGNS, "<a", "a> b", "b"])
    assert ours(texts) == package(texts)


def test_all_short_texts(gpt2: Json) -> None:
    package, ours = encoders(gpt2)
    texts = ["".join(signs) for size in range(5) for signs in itertools.product(SIGNS, repeat=size)]
    assert ours(texts) == package(texts)


@pytest.mark.parametrize("filler", ["x", " ", "é", "\u3000", "'"])
def test_texts_around_the_ends_of_blocks(gpt2: Json, filler: str) -> None:
    package, ours = encoders(gpt2)
    rng = random.Random(3)
    texts = [
        filler * size + "".join(rng.choices(SIGNS, k=6)) + filler * more
        for size in range(50, 140)
        for more in (0, 1, 64)
    ]
    assert ours(texts) == package(texts)


def test_contractions(gpt2: Json) -> None:
    package, ours = encoders(gpt2)
    ends = ["s", "t", "re", "ve", "m", "ll", "d", "S", "r", "l", "v", "", "é"]
    around = ["", " ", "a", "1", "'", "\n", "!"]
    texts = [f"{a}'{end}{b}" for a in around for end in ends for b in [*around, "'s", "'ll'd"]]
    assert ours(texts) == package(texts)


@pytest.mark.parametrize(
    "text",
    ["x" * 5_000_000, " " * 5_000_000, "\n" * 70_000 + "x", "ab" * 40_000 + " " * 65, "é" * 99_999],
)
def test_long_words(gpt2: Json, text: str) -> None:
    package, ours = encoders(gpt2)
    assert ours([text, "", "a " + text]) == package([text, "", "a " + text])


def test_merges_of_any_order(gpt2: Json) -> None:
    rng = random.Random(0)
    numbers = [7 + 3 * number for number in range(len(gpt2["model"]["vocab"]))]
    rng.shuffle(numbers)
    vocabulary = dict(zip(gpt2["model"]["vocab"], numbers, strict=True))
    stated = changed(gpt2, "model/vocab", vocabulary)
    stated["added_tokens"][0]["id"] = vocabulary["<|endoftext|>"]
    merges = [
        (word[:cut], word[cut:])
        for word in vocabulary
        for cut in range(1, len(word))
        if word[:cut] in vocabulary and word[cut:] in vocabulary
    ]
    rng.shuffle(merges)
    package, ours = encoders(changed(stated, "model/merges", merges))
    texts = [*made_up(3000, seed=4), "the" * 100, "0" * 65 + "\n" * 64]
    assert ours(texts) == package(texts)


def random_text(size: int, seed: int) -> str:
    text = base64.b64encode(random.Random(seed).randbytes(size * 3 // 4)).decode()
    return "".join(text[start : start + 70] + "\n" for start in range(0, len(text), 70))


def test_words_forgotten_and_met_again(gpt2: Json) -> None:
    package, ours = encoders(gpt2)
    for size in (20_000, 4_000_000, 20_000):  # the second fills the memory for words many times
        assert len(ours([random_text(size, seed=size)])[0]) > size // 4
    texts = [random_text(200_000, seed=seed) for seed in range(5)]
    assert ours(texts) == package(texts)


GROWTH = """
import sys
from pathlib import Path
from tests.data.tokenizers.test_byte_level import random_text
from tokamake.data.tokenizers import open_tokenizer
from tokamake.data.tokenizers._byte_level import ByteLevelEncoder
from tokamake.data.tokenizers._gigatoken import _resident_bytes, _trim
ours = ByteLevelEncoder(open_tokenizer(Path(sys.argv[1])))
sizes = []
for seed in range(12):
    ours.encode([random_text(2_000_000, seed)])
    _trim()
    sizes.append(_resident_bytes())
print(sizes[-1] - sizes[3])
"""


def test_memory_is_bounded(sampled: Path) -> None:
    command = [sys.executable, "-c", GROWTH, str(sampled / "tokenizer")]
    found = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    assert int(found.stdout) < 8_000_000


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


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_exact_is_refused(gpt2: Json, what: str) -> None:
    assert byte_level_refusal(json.dumps(gpt2).encode()) == ""
    assert byte_level_refusal(json.dumps(changed(gpt2, *REFUSED[what])).encode())


def test_tokens_that_are_refused(gpt2: Json) -> None:
    def refused(stated: Json) -> str:
        return byte_level_refusal(json.dumps(stated).encode())

    assert "has lstrip" in refused(added(gpt2, {"content": "<a>", "lstrip": True}))
    assert "another number" in refused(added(gpt2, {"content": "a"}))
    assert "many added" in refused(added(gpt2, *({"content": f"<{n}>"} for n in range(101))))
    fewer = dict(gpt2["model"]["vocab"])
    del fewer["Ā"]
    assert "a byte is not" in refused(changed(gpt2, "model/vocab", fewer))


def test_another_version_turns_it_off(sampled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = open_tokenizer(sampled / "tokenizer")
    assert refusal(opened) == ""
    monkeypatch.setattr(_character_classes, "VERSION", "0.1")
    assert "may classify characters in another way" in refusal(opened)


def test_arguments_are_checked() -> None:
    classes, singles = _character_classes.table(), np.arange(256, dtype=np.uint32)
    none = np.empty((0, 3), np.uint32)

    def make(
        classes: np.ndarray = classes,
        singles: np.ndarray = singles,
        merges: np.ndarray = none,
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
        make(merges=none.reshape(0, 2))
    with pytest.raises(ValueError, match="same pair"):
        make(merges=np.array([[1, 2, 256], [1, 2, 257]], np.uint32))
    for wrong in ([1, 2, 2**21], [2**32 - 1, 2, 3]):
        with pytest.raises(ValueError, match="21 bits"):
            make(merges=np.array([wrong], np.uint32))
    with pytest.raises(ValueError, match="not empty"):
        make(added=(("", 1),))
    with pytest.raises(TypeError):
        make(singles=singles.astype(np.int64))
    with pytest.raises(UnicodeEncodeError):
        make().encode(["\ud800"])
