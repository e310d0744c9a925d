"""gigatoken is used where it is exact: code points enumerated, texts made up, caches, versions."""

import importlib
import json
import random
import subprocess
import sys
from pathlib import Path

import gigatoken
import numpy as np
import pytest

from tests.support.gigatoken_texts import MARKED, byte_level, made_up, rows, unmarked
from tokamake._csrc import find_marked
from tokamake.data.tokenizers import _unicode_differences, open_tokenizer
from tokamake.data.tokenizers._exactness import REGEXES, json_refusal
from tokamake.data.tokenizers._gigatoken import Gigatoken, _stand_in, in_parts, refusal
from tokamake.data.tokenizers._unicode_differences import differing, encoders, revealing

ASSIGNED_PLANES = [*range(0x40000), *range(0xE0000, 0xE1000)]  # the others hold no character


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


def test_other_versions_turn_it_off(sampled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = open_tokenizer(sampled / "tokenizer")
    assert refusal(opened) == ""
    monkeypatch.setitem(_unicode_differences.VERSIONS, "tokenizers", "0.1")
    assert "python -m tokamake.data.tokenizers._unicode_differences" in refusal(opened)
    monkeypatch.setitem(_unicode_differences.VERSIONS, "nonexistent-package", "1")
    monkeypatch.delitem(_unicode_differences.VERSIONS, "tokenizers")
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
    table = _unicode_differences.table()
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
