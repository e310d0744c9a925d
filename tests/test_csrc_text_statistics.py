"""lib/csrc counts words, sentences, lines and repetition as plain Python does."""

import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import text_quality
from tokamake._csrc import C4Rules, TextStatistics
from tokamake.data.filters._characters import character_flags, statistics

ALPHABET = "abzABZéßЖ中ſK019 \t.…'’-–—~/:=<>,*+^#•{}[]()\n\r\v\x1c\x1f\u2028\x85\xa0_$€%😀─°\x00؟。"
PIECES = [
    *("n't", "'s", "’ll", "e.g.", "J.", "U.S.", "www.", "://", "...", "--", "a-b", "a.B", "1-2"),
    *("[1]", "[edit]", "[citation needed]", "[]", "JavaScript", "Lorem ipsum", "Cookie Policy"),
    *("\r\n", "\n\n", "• ", "the ", "to ", "and ", ". ", "! ", " ", "a" * 12),
]
TEXTS = st.lists(st.sampled_from([*ALPHABET, *PIECES]), max_size=60).map("".join) | st.text()
RULES: dict[str, Any] = {
    "max_word_characters": 10,
    "min_words": 2,
    "end_marks": True,
    "citations": True,
    "lorem_ipsum": True,
    "javascript": True,
    "curly_bracket": True,
    "policy": ["cookie policy"],
}


def assert_equal_counts(text: str) -> None:
    ours = statistics()
    assert ours.split_words(text) == text_quality.words(text)
    stop_words = ["the", "to", "and", "é中"]
    for found, expected in (
        (ours.words(text, stop_words), text_quality.word_counts(text, stop_words)),
        (ours.lines(text, short_characters=5), text_quality.line_counts(text, short_characters=5)),
        (ours.repetition(text), text_quality.repetition(text)),
    ):
        assert text_quality.as_counts(found, expected) == expected


@settings(max_examples=400, deadline=None)
@given(TEXTS)
def test_counts_of_nasty_texts(text: str) -> None:
    assert_equal_counts(text)


def test_counts_of_repetitive_texts() -> None:
    for text in text_quality.random_texts(seed=1, number=400):
        assert_equal_counts(text)


@settings(max_examples=400, deadline=None)
@given(TEXTS, st.sets(st.sampled_from([*RULES])))
def test_lines_of_c4(text: str, off: set[str]) -> None:
    nothing = {"max_word_characters": -1, "min_words": 0, "policy": []}
    rules = RULES | {name: nothing.get(name, False) for name in off}
    expected = text_quality.c4_lines(text, **rules)
    found = statistics().c4_lines(text, C4Rules(**rules))
    assert text_quality.as_counts(found, expected) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Don't panic (it's e.g. a well-known 3.14).", "Do n't panic ( it 's e.g. a well - known"),
        ("J. R. in the U.S. at 5 p.m.", "J. R. in the U.S. at 5 p.m."),
        ("see https://a.b/c-d, www.x-y.de.", "see https://a.b/c-d , www.x-y.de ."),
        ("wait... no… 2026-11-29 a/b x=y", "wait ... no … 2026 - 11 - 29 a / b x = y"),
        ("__init__ foo_bar end.Next I/O", "_ _ init _ _ foo_bar end . Next I / O"),
        ("中文，字符。 ©2026 a😀b", "中文，字符 。 © 2026 a 😀 b"),
    ],
)
def test_words(text: str, words: str) -> None:
    assert statistics().split_words(text)[: len(words.split())] == words.split()


@pytest.mark.parametrize(
    ("line", "number"),
    [
        ("", 1),
        ("One", 1),
        ("One. Two! Three", 3),
        ('He said "No." Then...', 2),
        ("a.b e.g. x?!", 1),
    ],
)
def test_sentences(line: str, number: int) -> None:
    assert statistics().sentences(line) == number


@pytest.mark.parametrize("part", ["a", "(", "a.", ". ", "a-", "'", "a\n", "[", "é中 ", "a)", "://"])
def test_long_documents_take_linear_time(part: str) -> None:
    text = part * (2_000_000 // len(part))
    start = time.process_time()
    ours = statistics()
    ours.words(text, ["the"])
    ours.lines(text, short_characters=30)
    ours.repetition(text)
    ours.c4_lines(text, C4Rules(**RULES | {"max_word_characters": -1, "min_words": 0}))
    assert time.process_time() - start < 20  # about 1 s; quadratic time is hours


def test_other_threads_run_meanwhile() -> None:
    text = "word of a text. " * 500_000
    thread = threading.Thread(target=statistics().repetition, args=(text,))
    thread.start()
    steps = 0
    while thread.is_alive():
        steps += 1
        time.sleep(0)
    thread.join()
    assert steps > 10


def test_a_lone_surrogate_is_an_error() -> None:
    with pytest.raises(UnicodeEncodeError):
        statistics().words("a\ud800", [])


def test_the_table_has_all_code_points() -> None:
    with pytest.raises(ValueError, match="each of 0x110000 code points"):
        TextStatistics(np.zeros(256, np.uint8))


def test_white_space_and_line_breaks_are_pythons() -> None:
    flags = character_flags()
    for point in range(sys.maxunicode + 1):
        assert bool(flags[point] & 1) == chr(point).isspace()
        assert bool(flags[point] & 2) == (len(f"a{chr(point)}b".splitlines()) > 1)
