"""gigatoken is exact for the checked versions, code points and texts; its memory is bounded."""

import json
import random
import subprocess
import sys
from pathlib import Path

import gigatoken
import numpy as np
import pytest

from tests.support.gigatoken_texts import MARKED, byte_level, random_texts, rows, unmarked
from tokamake._csrc import find_marked
from tokamake.data.tokenizers import _unicode_differences, open_tokenizer
from tokamake.data.tokenizers._exactness import REGEXES, json_refusal
from tokamake.data.tokenizers._gigatoken import Gigatoken, in_parts, refusal
from tokamake.data.tokenizers._unicode_differences import (
    differing_points,
    load_encoders,
    probe_tokenizer,
)

# The other planes hold no characters.
ASSIGNED_PLANES = [*range(0x40000), *range(0xE0000, 0xE1000)]


@pytest.mark.parametrize(
    ("name", "points"),
    [
        ("o200k", ASSIGNED_PLANES),
        pytest.param("o200k", range(0x110000), marks=pytest.mark.grid),
        pytest.param("GPT-2", ASSIGNED_PLANES, marks=pytest.mark.grid),
        pytest.param("Llama-3", ASSIGNED_PLANES, marks=pytest.mark.grid),
    ],
)
def test_the_table_holds_the_code_points_that_differ(name: str, points: list[int]) -> None:
    differing = differing_points(points, load_encoders(probe_tokenizer(REGEXES[name])))
    assert differing <= MARKED
    if name == "o200k":
        assert differing == MARKED
    else:  # expressions without \p{M} do not distinguish marks from other signs
        assert len(differing) == 4657


@pytest.mark.parametrize("name", REGEXES)
def test_random_texts_give_the_same_tokens(name: str) -> None:
    texts = unmarked(random_texts(4000, seed=1))
    for text in (probe_tokenizer(REGEXES[name]), json.dumps(byte_level(REGEXES[name]))):
        assert json_refusal(text.encode()) == ""
        reference, fast = load_encoders(text)
        assert reference(texts) == fast(texts)


def test_other_versions_of_the_packages_are_refused(
    sampled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = open_tokenizer(sampled / "tokenizer")
    assert refusal(tokenizer) == ""
    monkeypatch.setitem(_unicode_differences.VERSIONS, "tokenizers", "0.1")
    assert "python -m tokamake.data.tokenizers._unicode_differences" in refusal(tokenizer)
    monkeypatch.setitem(_unicode_differences.VERSIONS, "nonexistent-package", "1")
    monkeypatch.delitem(_unicode_differences.VERSIONS, "tokenizers")
    assert refusal(tokenizer) == "nonexistent-package is not installed"


def test_dropping_the_caches_does_not_change_tokens(
    sampled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = open_tokenizer(sampled / "tokenizer")
    loaded: list[bytes] = []
    load = gigatoken.Tokenizer.from_json
    monkeypatch.setattr(
        gigatoken.Tokenizer, "from_json", lambda text: loaded.append(text) or load(text)
    )
    texts = unmarked(random_texts(500, seed=10))
    keeping = Gigatoken(tokenizer)
    dropping = Gigatoken(tokenizer, growth_bytes=-(10**12))
    for _ in range(3):
        assert (
            rows(*keeping.encode(texts))
            == rows(*dropping.encode(texts))
            == tokenizer.encode_batch(texts)
        )
    assert len(loaded) == 2 + 3


GROWTH = """
import sys
from pathlib import Path
from tokamake.data.tokenizers import open_tokenizer
from tokamake.data.tokenizers._gigatoken import Gigatoken, _resident_bytes, _trim
words = " ".join(f"{number:07}" for number in range(400_000))
encoder = Gigatoken(open_tokenizer(Path(sys.argv[1])))
encoder.encode([words[:1000]])
_trim()
before = _resident_bytes()
encoder.encode([words])
_trim()
print(_resident_bytes() - before)
"""


def test_the_cache_does_not_grow_with_the_text(sampled: Path) -> None:
    command = [sys.executable, "-c", GROWTH, str(sampled / "tokenizer")]
    growth = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert growth < 15_000_000  # a cache that doubles as it fills takes 29 MB


def test_parts_end_once_they_are_large_enough() -> None:
    assert list(in_parts(["aa", "b", "cccc", "", "d"], 3)) == [["aa", "b"], ["cccc"], ["", "d"]]
    assert list(in_parts(["", ""], 3)) == [["", ""]]
    assert list(in_parts([], 3)) == []


def test_find_marked_returns_the_texts_with_marked_code_points() -> None:
    table = _unicode_differences.table()
    texts = [
        "", "ascii" * 30, "é" * 100, "日本語" * 50, "x" * 200 + "\u088f", "\u0c5c" + "😀" * 70,
        "😀" * 64 + "\U000323b0" + "a" * 3, "\U00033479", "\U0003347a", "\U0010ffff",
    ]  # fmt: skip
    assert find_marked(texts, table).tolist() == [4, 5, 6, 7]
    rng = random.Random(0)
    texts = random_texts(2000, seed=11) + [
        text + chr(rng.choice(sorted(MARKED))) for text in random_texts(500, seed=12)
    ]
    rng.shuffle(texts)
    expected = [number for number, text in enumerate(texts) if MARKED & set(map(ord, text))]
    assert find_marked(texts, table).tolist() == expected
    assert len(expected) >= 500
    with pytest.raises(TypeError, match="texts are strings"):
        find_marked(["a", b"b"], table)
    with pytest.raises(ValueError, match="0x110000"):
        find_marked(["a"], table[:-1])
    with pytest.raises(ValueError, match="below 256"):
        find_marked(["a"], np.ones(0x110000, np.uint8))


def test_parts_end_after_many_texts() -> None:
    texts = ["a"] * 150_000
    assert [len(part) for part in in_parts(texts, 10**9)] == [65536, 65536, 18928]
