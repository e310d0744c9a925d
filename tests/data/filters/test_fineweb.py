"""FineWeb's rules decide in their order; null switches each off."""

from typing import Any

import pytest

from tokamake.data.filters import Document
from tokamake.data.filters.fineweb import Filter

LINES = [f"Line {number} of this text has its own number and an end." for number in range(20)]


@pytest.mark.parametrize(
    ("text", "option", "dropped"),
    [
        (
            "\n".join(LINES).replace(".", ""),
            "min_ended_lines",
            ("share of lines with an end mark below 0.12", 0),
        ),
        (
            "\n".join([*LINES, ". \n" * 200]),
            "min_ended_lines",
            ("share of lines with an end mark below 0.12", 1 / 11),
        ),
        (
            "\n".join([*LINES, *map("{}.".format, range(60))]),
            "max_short_lines",
            ("share of short lines above 0.67", 0.75),
        ),
        (
            "\n".join([*LINES, LINES[0]]),
            "max_duplicate_characters",
            ("share of characters in duplicate lines above 0.01", 0.047),
        ),
        (
            "\n".join(LINES) + "\n" * 400,
            "max_line_feeds_per_word",
            ("line feeds per word above 0.3", 419 / 260),
        ),
    ],
)
def test_thresholds(text: str, option: str, dropped: tuple[str, float]) -> None:
    off = {name: None for name in Filter.model_fields if name[:4] in ("min_", "max_")}
    keeping: Any = off | {option: Filter.model_fields[option].default}
    drop = Filter(**keeping).apply(Document(text, {}))
    assert drop is not None
    assert drop.reason == dropped[0]
    assert drop.value == pytest.approx(dropped[1], abs=1e-3)
    assert Filter(**off).apply(Document(text, {})) is None


@pytest.mark.parametrize(("text", "dropped"), [("", ("empty", 0)), (" \n\t\n", ("empty", 0))])
def test_nothing(text: str, dropped: tuple[str, float]) -> None:
    assert Filter().apply(Document(text, {})) == dropped


def test_prose_is_kept() -> None:
    assert Filter().apply(Document("\n".join(LINES), {})) is None


def test_the_length_of_short_lines_is_a_setting() -> None:
    assert Filter(short_line_characters=60).apply(Document("\n".join(LINES), {})) == (
        "share of short lines above 0.67",
        1,
    )
