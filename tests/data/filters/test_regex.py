"""Documents are kept, dropped or changed by what an expression finds."""

from typing import Any

import pytest

from tokamake.data.filters import Document
from tokamake.data.filters.regex import Filter


@pytest.mark.parametrize(
    ("options", "dropped"),
    [
        ({"drop": "lorem"}, ("number of matches in text above 0", 2)),
        ({"drop": "LOREM"}, None),
        ({"drop": "LOREM", "ignore_case": True}, ("number of matches in text above 0", 2)),
        ({"drop": "^ipsum"}, None),
        ({"keep": "ipsum"}, None),
        ({"keep": "dolor"}, ("number of matches in text below 1", 0)),
        ({"drop": "^http:", "field": "url"}, ("number of matches in url above 0", 1)),
        ({"keep": "^http:", "field": "url"}, None),
        ({"keep": "^http:", "field": "absent"}, ("number of matches in absent below 1", 0)),
        ({"drop": "3", "field": "number"}, ("number of matches in number above 0", 1)),
        ({"drop": "0", "field": "zero"}, ("number of matches in zero above 0", 1)),
    ],
)
def test_what_is_found_decides(
    options: dict[str, Any], dropped: tuple[str, int | None] | None
) -> None:
    document = Document("lorem ipsum lorem", {"url": "http://a", "number": 3, "zero": 0})
    assert Filter(**options).apply(document) == dropped
    assert document.text == "lorem ipsum lorem"


def test_text_is_replaced() -> None:
    document = Document("call 12-34 or 56-78", {})
    changed = Filter(replace=r"(\d+)-(\d+)", replacement=r"\2-\1")
    assert changed.apply(document) is None
    assert document.text == "call 34-12 or 78-56"
    assert Filter(replace=r"\d").apply(document) is None
    assert document.text == "call - or -"


def test_a_filter_of_a_field_asks_for_it() -> None:
    assert Filter(drop="a", field="meta.url").metadata_keys == ("meta.url",)
    assert Filter(drop="a").metadata_keys == ()


def test_documents_without_the_field_are_counted() -> None:
    document = Document("a", {"url": "b", "number": 0, "null": None})
    for field in ("url", "ulr", "number", "null"):
        assert Filter(drop="c", field=field).apply(document) is None
    assert document.metrics == {"without ulr": 1, "without null": 1}
