"""C4's rules drop lines, then documents with too few sentences."""

from typing import Any

import pytest

from tests.support.filters import verdict
from tokamake.data.filters import Document
from tokamake.data.filters.c4 import Filter

SENTENCE = "This line has five words."
FIVE = "\n".join([SENTENCE] * 5)


@pytest.mark.parametrize(
    ("line", "options", "kept"),
    [
        ("This line has no end mark", {}, False),
        ("This line has no end mark", {"end_marks": False}, True),
        ("This line ends so...", {}, False),
        ('He said: "This line."', {}, True),
        ("Two words.", {}, False),
        ("Two words.", {"min_words": None}, True),
        (f"A {'long' * 251} word.", {}, False),
        (f"A {'long' * 251} word.", {"max_word_characters": None}, True),
        ("Please enable JavaScript here.", {}, False),
        ("Please enable JavaScript here.", {"drop_javascript": False}, True),
        ("Read the Terms of Use.", {}, False),
        ("Read the Terms of Use.", {"policy_phrases": []}, True),
        ("Read the fine print.", {"policy_phrases": ["Fine print"]}, False),
    ],
)
def test_lines(line: str, options: dict[str, Any], kept: bool) -> None:
    document = Document(f"{line}\n{FIVE}", {})
    assert Filter(**options).apply(document) is None
    assert document.text == (f"{line}\n{FIVE}" if kept else FIVE)
    assert sum(document.metrics.values()) == (not kept)


def test_citations_and_spaces_around_lines_go() -> None:
    text = f"  It is so[1], and so [citation needed]it is.[23]\t\r\n{FIVE}\n\n"
    assert verdict(Filter(), text) == (None, f"It is so, and so it is.\n{FIVE}")
    assert verdict(Filter(remove_citations=False), text) == (None, FIVE)


@pytest.mark.parametrize(
    ("text", "options", "dropped"),
    [
        (FIVE, {}, None),
        (SENTENCE * 2, {}, ("number of sentences below 5", 2)),  # no space after the full stop
        (f"{SENTENCE} {SENTENCE}\n{SENTENCE}", {}, ("number of sentences below 5", 3)),
        (f"{SENTENCE} {SENTENCE}\n{SENTENCE}", {"min_sentences": 3}, None),
        (f"{FIVE}\nif (a) {{ b; }} {{.", {}, ("number of { above 0", 2)),
        (f"{FIVE}\nif (a) {{ b; }}", {}, None),  # another rule has dropped the line
        (f"{FIVE}\nif (a) {{ b; }} {{.", {"drop_curly_brackets": False}, None),
        (f"{FIVE}\nThis is Lorem Ipsum.", {}, ('number of "lorem ipsum" above 0', 1)),
        (f"{FIVE}\nThis is Lorem Ipsum.", {"drop_lorem_ipsum": False}, None),
        ("", {}, ("number of sentences below 5", 0)),
        ("Menu", {"min_sentences": None}, ("number of lines that are left below 1", 0)),
        (FIVE, {"min_paragraphs": 3}, ("number of lines of 200 characters or more below 3", 0)),
        (FIVE, {"min_paragraphs": 3, "min_paragraph_characters": 25}, None),
    ],
)
def test_documents(text: str, options: dict[str, Any], dropped: tuple[str, int] | None) -> None:
    assert Filter(**options).apply(Document(text, {})) == dropped
