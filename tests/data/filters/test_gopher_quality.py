"""Gopher's rules about words and lines decide in their order; null switches each off."""

from typing import Any

import pytest

from tokamake.data.filters import Document
from tokamake.data.filters.gopher_quality import Filter

WORDS = "the house and " * 20
"""60 words with a mean length of 11 / 3."""


@pytest.mark.parametrize(
    ("text", "option", "dropped"),
    [
        (
            "the house and to, " * 12,
            "min_words",
            ("number of words below 50", 48),
        ),  # marks do not count
        (WORDS * 1700, "max_words", ("number of words above 100,000", 102_000)),
        ("of to ab " * 20, "min_mean_word_length", ("mean word length below 3", 2)),
        (
            "the and extraordinary extraordinary2 " * 20,
            "max_mean_word_length",
            ("mean word length above 8", 8.25),
        ),
        (WORDS + "# " * 10, "max_hashes_per_word", ("# per word above 0.1", 10 / 70)),
        ("… ... " * 5 + WORDS, "max_ellipses_per_word", ("ellipses per word above 0.1", 10 / 70)),
        (
            "- the house and it\n" * 20,
            "max_bullet_lines",
            ("share of lines with a bullet above 0.9", 1),
        ),
        (
            (WORDS + "...\n") * 2 + WORDS,
            "max_ellipsis_lines",
            ("share of lines that end in an ellipsis above 0.3", 2 / 3),
        ),
        (
            WORDS + "1234 " * 20,
            "min_alphabetic_words",
            ("share of words with a letter below 0.8", 60 / 80),
        ),
        ("a house and " * 20, "min_stop_words", ("number of stop words below 2", 1)),
    ],
)
def test_thresholds(text: str, option: str, dropped: tuple[str, float]) -> None:
    limits: dict[str, Any] = {"max_mean_word_length": 8} if option.startswith("max_mean") else {}
    document = Document(text, {})
    drop = Filter(**limits).apply(document)
    assert drop is not None
    assert drop.reason == dropped[0]
    assert drop.value == pytest.approx(dropped[1])
    assert Filter(**limits | {option: None}).apply(Document(text, {})) is None


def test_prose_is_kept_and_its_words_are_counted() -> None:
    document = Document(WORDS + ".", {})
    assert Filter().apply(document) is None
    assert document.metrics == {"words": 60}


def test_stop_words_are_a_setting() -> None:
    text = "der Hund und ein Haus " * 20
    assert Filter().apply(Document(text, {})) == ("number of stop words below 2", 0)
    assert Filter(stop_words=("der", "und", "die")).apply(Document(text, {})) is None
    assert Filter(stop_words=()).apply(Document(text, {})) == ("number of stop words below 2", 0)


def test_a_document_without_words() -> None:
    nothing = dict.fromkeys(("min_words", "min_mean_word_length", "min_alphabetic_words"))
    assert Filter(**nothing).apply(Document("", {})) == ("number of stop words below 2", 0)
    assert Filter(**nothing, min_stop_words=None).apply(Document(" \n", {})) is None
