"""Plain text of every kind of wikitext, in linear time."""

import random
import re
import time

import pytest

from tests.support.wikitext_cases import CASES
from tokamake.data.readers._wikitext import DROPPED_NAMESPACES, plain_text

DROPPED = DROPPED_NAMESPACES | {"datei", "kategorie"}
OPEN = [
    *("{{", "}}", "[[", "]]", "<ref>", "</ref>", "<!--", "{|\n", "\n{|", "<table>", "<nowiki>"),
    *("{{lang|x|", "[[a|", "[[a|[[b|", "[[File:a|[[b]]", "[//", "[//a", "[http://a ", "<ref name="),
    *("'", "''x", "__", "__a", "-{", "=", "= ", "&", "&a", "( {{a}}", "{{a}} ", "(;{{a}};", "<"),
    *("*", "| ", "{{{", "{{nowrap|", " ", "\n", "<math>x", "\n== a ==", "\n;"),
    *(
        "{{a|\n",
        "\n{{a\n",
        "{{a|x=1",
        "\n|-\n",
        "|a=b",
        "\n| a = b",
        "| -",
        "a {|\n",
        "\n|} a",
        "|+",
    ),
]


@pytest.mark.parametrize("wikitext", CASES)
def test_text_of_each_kind_of_markup(wikitext: str) -> None:
    assert plain_text(wikitext, DROPPED) == CASES[wikitext]


UNCLOSED = {
    "{{a|{{b}}This long sentence stays.": "This long sentence stays.",
    "{{a|x = 1|This stays.\n{{This stays.": "This stays.\nThis stays.",
    "{{Infobox\n| birth date = 1815\n| A stray cell\n|}\nText": "A stray cell\n\nText",
    "Text\n|- of a row\n| of a cell\n|+ of a caption\n|} of an end": (
        "Text\nof a row\nof a cell\nof a caption\nof an end"
    ),
    "{{table start}}\n|- class=x\n| a || b\n|-\n| c\n|} Text\n| stays": "Text\nstays",
    "|-\n| a cell\n== Section ==\n| Text": "Section\n\nText",
    "{|\n|a\n|b\n|} One\n|} Two": "One\nTwo",
    "{|\n|a\n|b Text\n\nMore": "More",
    "Text {|\n|a\n|}": "Text\na",
    "Text <!-- open\n\nMore": "Text",
    "{{a}}} Text": "} Text",
}
"""As MediaWiki shows it, without marks; parameters and the cells of a table go."""


@pytest.mark.parametrize("wikitext", UNCLOSED)
def test_markup_that_is_not_closed_keeps_its_text(wikitext: str) -> None:
    assert plain_text(wikitext) == UNCLOSED[wikitext]


def test_markup_of_one_paragraph_does_not_change_another() -> None:
    balanced = [text for text in CASES if not re.search("open|left|}} and", text)]
    rng = random.Random(1)
    for _ in range(50):
        chosen = [f"Start.\n\n{text}\n\nEnd." for text in rng.sample(balanced, 5)]
        chosen = [text for text in chosen if "{{a}}}}" not in text and "</ref> more" not in text]
        alone = "\n\n".join(plain_text(text, DROPPED) for text in chosen)
        assert re.sub("\n+", "\n", plain_text("\n\n".join(chosen), DROPPED)) == re.sub(
            "\n+", "\n", alone
        )


@pytest.mark.parametrize("mark", OPEN)
@pytest.mark.parametrize("end", ["", "}}]]|}</ref>"])
def test_unbalanced_markup_takes_linear_time(mark: str, end: str) -> None:
    wikitext = mark * (400_000 // len(mark)) + end * (len(end) and 4_000)
    start = time.process_time()
    plain_text(wikitext)
    # About 0.2 s; with a quadratic pass it would take minutes.
    assert time.process_time() - start < 5


def test_random_markup_gives_text_without_marks() -> None:
    rng = random.Random(2)
    parts = [
        *OPEN,
        "}}",
        "]]",
        "|}",
        "-->",
        "</nowiki>",
        "word ",
        "|",
        "\n",
        "\n| ",
        "]",
        "}",
        "a:",
    ]
    for _ in range(2000):
        text = plain_text("".join(rng.choices(parts, k=rng.randrange(1, 30))))
        assert not set(text) & set("\x01\x02\x03\x04")
        text.encode()


@pytest.mark.extra("oracles", "mwparserfromhell")
def test_words_of_prose_agree_with_mwparserfromhell() -> None:
    import mwparserfromhell

    # It keeps captions, cells, references and braces that are open, and drops all templates.
    prose = [text for text in CASES if not re.search("[{:/=*_>]|open|here|left", text)]
    assert len(prose) > 5
    for text in prose:
        assert plain_text(text).split() == mwparserfromhell.parse(text).strip_code().split()
