"""Code points on which the Unicode tables of gigatoken and of the tokenizers package differ.

`python -m tokamake.data.tokenizers._unicode_differences` finds them for the installed versions.
"""

import json
from collections.abc import Callable, Iterable
from importlib.metadata import version
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

VERSIONS = {"gigatoken": "0.10.0", "tokenizers": "0.23.3"}
"""Versions that RANGES were found with."""

RANGES = """
88F C5C CDC 1ACF-1ADD 1AE0-1AEB A7CE-A7CF A7D2 A7D4 A7F1 10940-10959 10EC5-10EC7 10EFA-10EFB
11B60-11B67 11DB0-11DDB 11DE0-11DE9 16EA0-16EB8 16EBB-16ED3 16FF2-16FF6 187F8-187FF 18D09-18D1E
18D80-18DF2 1E6C0-1E6DE 1E6E0-1E6F5 1E6FE-1E6FF 2B73A-2B73F 2CEA2-2CEAD 323B0-33479
"""
"""The code points in hexadecimal, first to last, for all expressions of `_exact.REGEXES`."""

Encode = Callable[[list[str]], list[list[int]]]


def table() -> NDArray[np.uint8]:
    """(0x110000,) 1 for each code point in RANGES."""
    marks = np.zeros(0x110000, np.uint8)
    for part in RANGES.split():
        first, _, last = part.partition("-")
        marks[int(first, 16) : int(last or first, 16) + 1] = 1
    return marks


def differing(points: Iterable[int], one: Encode, other: Encode, *, at_once: int = 128) -> set[int]:
    """Code points that two encoders treat differently in text that shows what they count as.

    Args:
        points: code points; surrogates are left out.
        one: an encoder made from `revealing`, as `other`.
        other: see `one`.
        at_once: code points that share a text at first.
    """
    points = [point for point in points if not 0xD800 <= point < 0xE000]
    groups = [points[start : start + at_once] for start in range(0, len(points), at_once)]
    found: set[int] = set()
    for start in range(0, len(groups), 64):
        some = groups[start : start + 64]
        texts = ["".join(_shown(point) for point in group) for group in some]
        for group, a, b in zip(some, one(texts), other(texts), strict=True):
            if a != b:
                found |= differing(group, one, other, at_once=1) if len(group) > 1 else {*group}
    return found


def _shown(point: int) -> str:
    """A code point beside letters of both cases, digits, signs, spaces and contractions."""
    return "a{0}1 {0}A!!{0}a'{0}{0}\n".format(chr(point))


def revealing(regex: str) -> str:
    """tokenizer.json of a byte-level BPE whose tokens show where `regex` splits such texts.

    Any two bytes that may meet at the border of a character of several bytes are a token.
    """
    characters = alphabet()
    near = [characters[byte] for byte in b"aA1! \n'"]
    leads = [characters[byte] for byte in range(0xC2, 0xF5)]
    tails = [characters[byte] for byte in range(0x80, 0xC0)]
    pairs = [*product(near, leads), *product(tails, near), *product(tails, leads)]
    pairs += product(near, near)
    vocabulary = {characters[byte]: byte for byte in range(256)}
    vocabulary |= {a + b: 256 + number for number, (a, b) in enumerate(pairs)}
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    last = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [],
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, last]},
            "model": {"type": "BPE", "vocab": vocabulary, "merges": pairs},
        }
    )


def alphabet() -> dict[int, str]:
    """The character that stands for each byte in byte-level vocabularies since GPT-2's."""
    itself = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in itself]
    return {byte: chr(byte) for byte in itself} | {b: chr(256 + n) for n, b in enumerate(others)}


def encoders(text: str) -> tuple[Encode, Encode]:
    """The `tokenizers` package and gigatoken, both with this tokenizer.json."""
    import gigatoken
    import tokenizers

    reference = tokenizers.Tokenizer.from_str(text)
    fast: Any = gigatoken.Tokenizer.from_json(text)
    return (
        lambda texts: [e.ids for e in reference.encode_batch_fast(texts, add_special_tokens=False)],
        fast.encode_batch_list,
    )


def ranges(points: Iterable[int]) -> str:
    """Code points as RANGES has them, without line breaks."""
    spans: list[list[int]] = []
    for point in sorted(points):
        if spans and spans[-1][1] == point - 1:
            spans[-1][1] = point
        else:
            spans.append([point, point])
    return " ".join(f"{a:X}" if a == b else f"{a:X}-{b:X}" for a, b in spans)


def _print() -> None:
    from tokamake.data.tokenizers._exactness import REGEXES

    found: set[int] = set()
    for regex in REGEXES.values():
        found |= differing(range(0x110000), *encoders(revealing(regex)))
    print(f"VERSIONS = { {package: version(package) for package in VERSIONS} }")
    print(f'RANGES = """{ranges(found)}"""')


if __name__ == "__main__":
    _print()
