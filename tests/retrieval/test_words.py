"""Words equal the tokens of DPR's SimpleTokenizer."""

import random
import unicodedata

import pytest
import regex

from tokamake.retrieval.words import is_run, words

# The rule of dpr/utils/tokenizers.py.
SIMPLE = regex.compile(
    r"([\p{L}\p{N}\p{M}]+)|([^\p{Z}\p{C}])", regex.IGNORECASE | regex.UNICODE | regex.MULTILINE
)


def simple_tokenizer(text: str) -> list[str]:
    return [match[0].lower() for match in SIMPLE.finditer(unicodedata.normalize("NFD", text))]


@pytest.mark.parametrize(
    "text",
    [
        "Émile's 1st café—№ 5, don't_stop!",
        "  tabs\tand\nlines\u00a0and\u200bzero widths ",
        "東京 2020年 ①②½ ⅷ हिन्दी עִבְרִית İstanbul 😀🏽 a\u0301b",
        "",
    ],
)
def test_words_equal_those_of_dpr(text: str) -> None:
    assert words(text) == simple_tokenizer(text)


def test_words_of_random_characters_equal_those_of_dpr() -> None:
    draw = random.Random(1)
    for _ in range(200):
        codes = [draw.choice([draw.randrange(0x3000), draw.randrange(0xD800)]) for _ in range(50)]
        # The versions of Unicode of the two packages may differ in the newest characters.
        text = "".join(map(chr, codes))
        known = "".join(char for char in text if regex.match(r"\P{Cn}", char))
        known = "".join(char for char in known if unicodedata.category(char) != "Cn")
        assert words(known) == simple_tokenizer(known)


def test_runs_are_told_from_symbols() -> None:
    found = words("Don't pay $5!")
    assert found == ["don", "'", "t", "pay", "$", "5", "!"]
    assert [*filter(is_run, found)] == ["don", "t", "pay", "5"]
