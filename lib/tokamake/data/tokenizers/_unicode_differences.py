"""Code points that gigatoken and the tokenizers package classify differently.

`python -m tokamake.data.tokenizers._unicode_differences` finds them for the installed versions.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokamake.data.tokenizers._exactness import byte_alphabet

VERSIONS = {"gigatoken": "0.10.0", "tokenizers": "0.23.3"}
"""Versions of the packages that RANGES describe."""

RANGES = """
88F C5C CDC 1ACF-1ADD 1AE0-1AEB A7CE-A7CF A7D2 A7D4 A7F1 10940-10959 10EC5-10EC7 10EFA-10EFB
11B60-11B67 11DB0-11DDB 11DE0-11DE9 16EA0-16EB8 16EBB-16ED3 16FF2-16FF6 187F8-187FF 18D09-18D1E
18D80-18DF2 1E6C0-1E6DE 1E6E0-1E6F5 1E6FE-1E6FF 2B73A-2B73F 2CEA2-2CEAD 323B0-33479
"""
"""Code points for all expressions of `_exactness.REGEXES`: hexadecimal ranges, first-last."""

Encode = Callable[[list[str]], list[list[int]]]

_GROUPS_PER_CALL = 64


def table() -> NDArray[np.uint8]:
    """(0x110000,) 1 for each code point in RANGES, else 0."""
    marks = np.zeros(0x110000, np.uint8)
    for span in parse_ranges(RANGES):
        marks[span] = 1
    return marks


def differing_points(
    points: Iterable[int], encoders: tuple[Encode, Encode], *, group_size: int = 128
) -> set[int]:
    """Return the code points that two encoders of a `probe_tokenizer` classify differently.

    Surrogates are ignored. Texts of `group_size` code points are compared first; where they differ,
    each code point is compared.
    """
    points = [point for point in points if not 0xD800 <= point < 0xE000]
    groups = [points[start : start + group_size] for start in range(0, len(points), group_size)]
    encode_a, encode_b = encoders
    differing: set[int] = set()
    for start in range(0, len(groups), _GROUPS_PER_CALL):
        batch = groups[start : start + _GROUPS_PER_CALL]
        texts = ["".join(map(_probe_text, group)) for group in batch]
        for group, a, b in zip(batch, encode_a(texts), encode_b(texts), strict=True):
            if a != b and len(group) > 1:
                differing |= differing_points(group, encoders, group_size=1)
            elif a != b:
                differing |= {*group}
    return differing


def _probe_text(point: int) -> str:
    """Return a code point beside letters of both cases, digits, signs, spaces, contractions."""
    return "a{0}1 {0}A!!{0}a'{0}{0}\n".format(chr(point))


def probe_tokenizer(regex: str) -> str:
    """Return a byte-level tokenizer.json whose tokens show where `regex` splits a probe text.

    Any two bytes that can meet at the border of a multi-byte character form a token.
    """
    characters = byte_alphabet()
    neighbors = [characters[byte] for byte in b"aA1! \n'"]
    leads = [characters[byte] for byte in range(0xC2, 0xF5)]  # first bytes in UTF-8
    tails = [characters[byte] for byte in range(0x80, 0xC0)]  # continuation bytes
    pairs = [*product(neighbors, leads), *product(tails, neighbors), *product(tails, leads)]
    pairs += product(neighbors, neighbors)
    vocabulary = {characters[byte]: byte for byte in range(256)}
    vocabulary |= {a + b: 256 + rank for rank, (a, b) in enumerate(pairs)}
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    to_bytes = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [],
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, to_bytes]},
            "model": {"type": "BPE", "vocab": vocabulary, "merges": pairs},
        }
    )


def load_encoders(text: str) -> tuple[Encode, Encode]:
    """Load a tokenizer.json with the `tokenizers` package and with gigatoken."""
    import gigatoken
    import tokenizers

    reference = tokenizers.Tokenizer.from_str(text)
    fast: Any = gigatoken.Tokenizer.from_json(text)
    return (
        lambda texts: [e.ids for e in reference.encode_batch_fast(texts, add_special_tokens=False)],
        fast.encode_batch_list,
    )


def parse_ranges(text: str) -> Iterator[slice]:
    """Yield the spans of code points in text like RANGES."""
    for span in text.split():
        first, _, last = span.partition("-")
        yield slice(int(first, 16), int(last or first, 16) + 1)


def format_ranges(points: Iterable[int]) -> str:
    """Format code points like RANGES, without line breaks."""
    spans: list[list[int]] = []
    for point in sorted(points):
        if spans and spans[-1][1] == point - 1:
            spans[-1][1] = point
        else:
            spans.append([point, point])
    return " ".join(f"{a:X}" if a == b else f"{a:X}-{b:X}" for a, b in spans)


def _print() -> None:
    from tokamake.data.tokenizers._exactness import REGEXES

    differing: set[int] = set()
    for regex in REGEXES.values():
        differing |= differing_points(range(0x110000), load_encoders(probe_tokenizer(regex)))
    print(f"VERSIONS = { {package: version(package) for package in VERSIONS} }")
    print(f'RANGES = """{format_ranges(differing)}"""')


if __name__ == "__main__":
    _print()
