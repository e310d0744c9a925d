"""Gopher's rules about repetition decide in their order; null switches each off."""

import pytest

from tokamake.data.filters import Document
from tokamake.data.filters.gopher_repetition import Filter


def numbers(first: int, last: int) -> str:
    return " ".join(f"w{number}" for number in range(first, last))


LINES = [numbers(start, start + 20) for start in range(100, 900, 20)]
"""40 lines without a repeated word."""
PARTS = {
    "max_duplicate_paragraphs": "duplicate paragraphs",
    "max_duplicate_paragraph_characters": "characters in duplicate paragraphs",
    "max_duplicate_lines": "duplicate lines",
    "max_duplicate_line_characters": "characters in duplicate lines",
    **{f"max_top_{n}_gram": f"characters in the most frequent {n}-gram" for n in (2, 3, 4)},
    **{f"max_duplicate_{n}_grams": f"characters in duplicate {n}-grams" for n in range(5, 11)},
}
RULES = [option for option in Filter.model_fields if option.startswith("max_")]


@pytest.mark.parametrize(
    ("text", "option", "value"),
    [
        ("\n\n".join([*LINES[:6], "a", "a", "a", "a"]), "max_duplicate_paragraphs", 3 / 10),
        ("\n\n".join([*LINES[:4], LINES[0]]), "max_duplicate_paragraph_characters", 99 / 503),
        ("\n".join([*LINES[:6], "a", "a", "a", "a"]), "max_duplicate_lines", 3 / 10),
        ("\n".join([*LINES[:4], LINES[0]]), "max_duplicate_line_characters", 99 / 499),
        (numbers(100, 107) + " the end" * 2, "max_top_2_gram", 14 / 50),
        (numbers(100, 107) + " to the end" * 2, "max_top_3_gram", 20 / 56),
        (numbers(100, 107) + " so to the end" * 2, "max_top_4_gram", 26 / 62),
        *(
            (
                f"{numbers(100, 120)} {numbers(100, 100 + n)}",
                f"max_duplicate_{n}_grams",
                4 * n / (5 * (20 + n) - 1),
            )
            for n in range(5, 11)
        ),
    ],
)
def test_thresholds(text: str, option: str, value: float) -> None:
    """The threshold itself is kept; the other rules are off."""
    off = dict.fromkeys(RULES)
    assert Filter(**off).apply(Document(text, {})) is None
    assert Filter(**off | {option: value}).apply(Document(text, {})) is None
    drop = Filter(**off | {option: value - 1e-6}).apply(Document(text, {}))
    assert drop is not None
    assert drop.reason == f"share of {PARTS[option]} above {value - 1e-6:.6g}"
    assert drop.value == pytest.approx(value)


def test_defaults() -> None:
    assert Filter().apply(Document("\n".join(LINES), {})) is None
    assert Filter().apply(Document("", {})) == ("empty", 0)
    for separator, reason in (
        ("\n\n", "share of duplicate paragraphs above 0.3"),
        ("\n", "share of duplicate lines above 0.3"),
        (" ", "share of characters in duplicate 5-grams above 0.15"),
    ):
        text = separator.join([LINES[0], LINES[1], LINES[0], LINES[1]])
        drop = Filter().apply(Document(text, {}))
        assert drop is not None
        assert drop.reason == reason


def test_few_words_repeat_nothing() -> None:
    off = {option: None for option in RULES if "top" in option}
    assert Filter(**off).apply(Document("one two", {})) is None
    drop = Filter().apply(Document("one two", {}))  # as in datatrove: one 2-gram is all of it
    assert drop == ("share of characters in the most frequent 2-gram above 0.2", 1)
