"""Documents outside the bounds are dropped, each bound included."""

from typing import Any

import pytest

from tokamake.data.filters import Document
from tokamake.data.filters.length import Filter

TEXT = "one two\n\n  \nthree"


@pytest.mark.parametrize(
    ("options", "dropped"),
    [
        ({"min_characters": len(TEXT)}, None),
        (
            {"min_characters": len(TEXT) + 1},
            (f"number of characters below {len(TEXT) + 1}", len(TEXT)),
        ),
        ({"max_characters": len(TEXT)}, None),
        (
            {"max_characters": len(TEXT) - 1},
            (f"number of characters above {len(TEXT) - 1}", len(TEXT)),
        ),
        ({"min_words": 3, "max_words": 3}, None),
        ({"min_words": 4}, ("number of words below 4", 3)),
        ({"max_words": 2}, ("number of words above 2", 3)),
        ({"min_lines": 2, "max_lines": 2}, None),  # blank lines do not count
        ({"min_lines": 3}, ("number of lines below 3", 2)),
        (
            {"max_lines": 1, "min_words": 9},
            ("number of words below 9", 3),
        ),  # the first bound decides
    ],
)
def test_bounds(options: dict[str, Any], dropped: tuple[str, int] | None) -> None:
    assert Filter(**options).apply(Document(TEXT, {})) == dropped


def test_characters_are_code_points() -> None:
    assert Filter(min_characters=2).apply(Document("中é", {})) is None
    assert Filter(min_characters=1).apply(Document("", {})) == ("number of characters below 1", 0)
