"""Normalization in lib/csrc: its bounds of memory, and normalizers that are refused."""

import json
import unicodedata
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, normalizers

from tests.support.tokenizer_texts import byte_level, encoders
from tokamake._csrc import BytePairs, TextEncoder
from tokamake.data.tokenizers import _normalization as normalization
from tokamake.data.tokenizers._exactness import Unsupported
from tokamake.data.tokenizers._normalization import JOINS, compile_normalizer, compile_words


def marking(normalize: Callable[[str], str], **options: Any) -> Callable[[str], list[int]]:
    """Encoder to bytes that normalizes x, and what is before it; or words with x."""
    model = BytePairs(np.arange(256, dtype=np.uint32), np.empty((0, 3), np.uint32))
    marks = np.zeros(0x110000, np.uint8)
    marks[ord("x")] = JOINS if options.get("normalizes_words") else 1
    options = {"joints": np.ones(1 << 16, np.uint8), "marks": marks} | options
    encoder = TextEncoder(model, **options)
    return lambda text: encoder.encode([text], normalize)[0].tolist()


def test_text_that_grows_too_much_when_it_is_normalized_is_refused() -> None:
    for words in (False, True):
        encode = marking(lambda text: text.replace("x", "y" * 12), normalizes_words=words)
        assert encode("a" * 1000 + "x") == [97] * 1000 + [121] * 12
        encode = marking(lambda text: text.replace("x", "y" * 10_000), normalizes_words=words)
        with pytest.raises(ValueError, match="normalized text is too long"):
            encode("a" * 1000 + "x")
    # The space of the prefix may not grow.
    assert marking(lambda _: "y" * 15, normalizes_words=True, prefix="always")("x") == [121] * 15
    with pytest.raises(ValueError, match="too many tokens"):
        marking(lambda _: "y" * 24, normalizes_words=True, prefix="always")("x")


def test_sizes_that_overflow_are_refused() -> None:
    numbers = np.zeros(0x110000, np.uint32)
    numbers[ord("z")] = 1
    grows = numbers, ["", "y" * (1 << 20)], np.empty(0, np.uint8)
    encode = marking(str, before=grows, after=grows)
    with pytest.raises(ValueError, match="texts are too long"):
        encode("a" * (2 << 20))


def test_memory_of_normalized_words_is_bounded() -> None:
    counts: Counter[str] = Counter()

    def normalize(text: str) -> str:
        counts[text] += 1
        return text.upper()

    encode = marking(normalize, normalizes_words=True)
    short, long = "ax", "a" * 2000 + "x"
    for _ in range(3):
        assert encode(short) == [*b"AX"]
        assert encode(long) == [*long.upper().encode()]
    assert (counts[short], counts[long]) == (1, 3)
    for number in range(500_000, 518_000):  # of 2 KB each
        encode(f"{number}x".rjust(1000, "a"))
    again = "500000x".rjust(1000, "a")
    encode(again)
    assert counts[again] == 2


def test_long_runs_of_marks_are_sorted() -> None:
    encode = marking(str, **compile_normalizer(b'{"type": "NFD"}').arguments)
    high, low, many = "\u0301", "\u0323", 100_000
    assert encode("a" + (high + low) * many) == [*("a" + low * many + high * many).encode()]
    text = f"{high}{low}x\u0345\u00e9{low}{high}"
    assert encode(text) == [*unicodedata.normalize("NFD", text).encode()]


@pytest.mark.parametrize("compiled", [compile_normalizer, compile_words])
def test_normalizers_that_write_long_texts_are_refused(compiled: Callable[[bytes], Any]) -> None:
    def replace(size: int) -> bytes:
        step = {"type": "Replace", "pattern": {"String": "x"}, "content": "y" * size}
        return json.dumps(step).encode()

    compiled(replace(12))
    with pytest.raises(Unsupported, match="writes 13 characters for 'x'"):
        compiled(replace(13))


@pytest.mark.parametrize("form", ["NFD", "NFKD"])
@pytest.mark.parametrize(("old", "new"), [("\u0301", ""), ("x", "\u0323"), ("x", "\u00e9")])
def test_marks_that_are_replaced_and_sorted_are_refused(form: str, old: str, new: str) -> None:
    replace = {"type": "Replace", "pattern": {"String": old}, "content": new}
    for steps in ([replace, {"type": form}], [{"type": form}, {"type": "Lowercase"}, replace]):
        definition = json.dumps({"type": "Sequence", "normalizers": steps}).encode()
        with pytest.raises(Unsupported, match="sorts marks and replaces one"):
            compile_normalizer(definition)


def test_panics_of_the_package_are_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):
        """As pyo3 raises it."""

    class Panics:
        def normalize_str(self, text: str) -> str:
            raise PanicException(f"no form of {text}")

    class Loaded:
        normalizer = Panics()

    monkeypatch.setattr(Tokenizer, "from_str", lambda _: Loaded(), raising=True)
    with pytest.raises(Unsupported, match=r"its normalizer fails \(no form of"):
        normalization.normal_forms(normalization._function([]), ["a"])


def test_added_texts_that_normalize_to_nothing_are_refused() -> None:
    tokenizer: Any = Tokenizer.from_str(json.dumps(byte_level()))
    tokenizer.normalizer = normalizers.Replace("q", "")
    assert encoders(tokenizer.to_str().encode(), "tokenizers")[0] == ""
    tokenizer.add_tokens(["q"])
    assert (
        "is empty when it is normalized" in encoders(tokenizer.to_str().encode(), "tokenizers")[0]
    )
