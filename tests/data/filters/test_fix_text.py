"""Texts are what ftfy makes of them, also where the filter does not call it."""

import itertools
import re
import time
from typing import Any

import ftfy
import pytest
from ftfy.badness import BADNESS_RE, MOJIBAKE_CATEGORIES, is_bad
from hypothesis import example, given
from hypothesis import strategies as st

from tokamake.data.filters import Document
from tokamake.data.filters._time_limit import TimeLimit, TimeLimitExceeded
from tokamake.data.filters.fix_text import Filter

WEB = {
    "fix_latin_ligatures": False,
    "fix_character_width": False,
    "uncurl_quotes": False,
    "fix_line_breaks": False,
    "normalization": None,
}
"""Defaults of datatrove for ftfy."""
STRICT: dict[str, Any] = {
    "fix_latin_ligatures": True,
    "fix_character_width": True,
    "uncurl_quotes": True,
    "fix_line_breaks": True,
    "normalization": "NFC",
}
"""Defaults of ftfy."""


def make(**options: Any) -> Filter:
    made = Filter(**options)
    made.setup()
    return made


DEFAULT = make()


def fixed(text: str, fix_text: Filter = DEFAULT) -> str:
    document = Document(text, {})
    assert fix_text.apply(document) is None
    return document.text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("âœ” No problems", "✔ No problems"),
        ("voilÃ  le travail, schÃ¶n", "voilà le travail, schön"),
        ("Ð¿Ñ€Ð¸Ð²ÐµÑ‚", "привет"),
        ("l’humanitÃ©", "l’humanité"),
        ("a line\nschÃ¶n\nschön", "a line\nschön\nschön"),
        ("AT&amp;T &lt;b&gt;", "AT&T <b>"),
        ("<p>\nAT&amp;T", "<p>\nAT&amp;T"),
        ("AT&amp;T\n<p>\nAT&amp;T", "AT&T\n<p>\nAT&amp;T"),
        ("\033[31mred\033[0m\0", "red"),
        ("wait\x85 \ufeffno", "wait… no"),
        # What people wrote stays: widths, quotes, ligatures, line breaks, decomposed letters.
        ("“ＬＯＵＤ” ﬂag\r\nа\u2028e\u0301", None),
        ("R&D, a & b; naïve «café» – 10 °C, Ærøskøbing, œuvre, ÂME, Ça ira", None),
        ("", None),
    ],
)
def test_damage_is_repaired(text: str, expected: str | None) -> None:
    assert fixed(text) == (text if expected is None else expected)
    assert fixed(text) == ftfy.fix_text(text, **WEB)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "text", "expected"),
    [
        ({"unescape_html": False}, "&amp;", "&amp;"),
        ({"unescape_html": True}, "<&amp;", "<&"),
        ({"remove_terminal_escapes": False}, "\033[1m", "[1m"),
        ({"fix_encoding": False}, "schÃ¶n", "schÃ¶n"),
        (
            {"restore_byte_a0": False, "decode_inconsistent_utf8": False},
            "voilÃ  le travail",
            "voilÃ  le travail",
        ),
        ({"replace_lossy_sequences": False}, "â€œquotedâ€\ufffd", "“quotedâ€\ufffd"),
        ({"decode_inconsistent_utf8": False}, "ж schÃ¶n ж", "ж schÃ¶n ж"),
        ({"fix_c1_controls": False, "fix_encoding": False}, "a\x85", "a\x85"),
        ({"remove_control_chars": False}, "a\0", "a\0"),
        ({"fix_latin_ligatures": True}, "ﬂag", "flag"),
        ({"fix_character_width": True}, "ＯＫ", "OK"),
        ({"uncurl_quotes": True}, "“ok”", '"ok"'),
        ({"fix_line_breaks": True}, "a\r\nb\rc", "a\nb\nc"),
        ({"fix_line_breaks": True}, "a\u2028b", "a\nb"),
        ({"normalization": "NFC"}, "e\u0301", "é"),
        ({"normalization": "NFKC"}, "10³", "103"),
    ],
)
def test_options_are_those_of_ftfy(options: dict[str, Any], text: str, expected: str) -> None:
    assert fixed(text, make(**options)) == expected


PARTS = [
    *("&amp;", "&lt", "&#65;", "<", "\n", "\r\n", "\033[0m", "\0", "\x85", "\ufeff", " ", "a", "Z"),
    *(
        "Ã©",
        "Ã ",
        "â€™",
        "â€œ",
        "Ð¿",
        "ã\x81\x82",
        "ï»¿",
        "Â ",
        "Â»",
        "à¤",
        "вЂ",
        "ГўВЂВ.",
        "√±",
        "×²",
    ),
    *(
        "é",
        "ç",
        "œ",
        "Œ",
        "Ç",
        "°",
        "€",
        "“",
        "”",
        "’",
        "—",
        "中",
        "я",
        "Я",
        "ς",
        "ﬁ",
        "Ａ",
        "e\u0301",
    ),
]


@given(st.lists(st.sampled_from(PARTS) | st.text(max_size=3)).map("".join))
@example("a\nÃ ")
def test_the_fast_path_changes_nothing(text: str) -> None:
    assert fixed(text) == ftfy.fix_text(text, **WEB)  # type: ignore[arg-type]
    assert fixed(text, make(**STRICT)) == ftfy.fix_text(text)
    other = {"normalization": "NFC", "unescape_html": True, "fix_line_breaks": True}
    assert fixed(text, make(**other)) == ftfy.fix_text(text, **{**WEB, **other})


def test_every_kind_of_mojibake_reaches_ftfy() -> None:
    """All pairs of characters of its expression, alone, between letters and on a line."""
    categories = "".join(MOJIBAKE_CATEGORIES.values())
    characters = set(re.findall("[^\x00-\x7f]", BADNESS_RE.pattern))
    for first, last in re.findall("(.)-(.)", categories):
        characters |= {chr(code) for code in range(ord(first), ord(last) + 1)}
    pairs = map("".join, itertools.product([*sorted(characters), *"aA .\n0"], repeat=2))
    num_bad = 0
    for pair in pairs:
        for text in (pair, f"a{pair}a", f"\n{pair} "):
            if is_bad(text):
                num_bad += 1
                assert DEFAULT._can_change(text), ascii(text)
    assert num_bad > 50_000


def test_most_texts_do_not_reach_ftfy() -> None:
    for text in (
        "Plain text: 3 < 4, a & b.\tTabs\r\nand lines.\n" * 5,
        "L’été dernier, “nous” étions à Orléans — près d’une œuvre d’art…",
        "Çok güzel bir gün; müşteri Ömer’in işi İstanbul’da.",
        "Вчера мы долго гуляли по набережной. «Да», — сказал он.",
        "昨日の夜、川のそばを散歩しました。「はい」",
    ):
        assert not DEFAULT._can_change(text)


@pytest.mark.extra("oracles", "datatrove")
@pytest.mark.parametrize("text", ["schÃ¶n “ok” ﬂ\r\n", "<b>&amp;", "Ð¿Ñ€Ð¸Ð²ÐµÑ‚ &amp; more"])
def test_the_defaults_are_those_of_datatrove(text: str) -> None:
    from datatrove.pipeline.formatters import FTFYFormatter

    oracle: Any = FTFYFormatter()
    assert fixed(text) == oracle.format(text)
    ours = DEFAULT.model_dump()
    assert ours == {key: value for key, value in oracle.config._asdict().items() if key in ours}


@pytest.mark.parametrize(
    "text",
    ["Ã©\n" * 300_000, "Ã" * 900_000, "word â€™" * 500_000],
    ids=["many lines", "one line without spaces", "a long line"],
)
def test_the_time_limit_of_a_document_interrupts_ftfy(text: str) -> None:
    limit = TimeLimit(0.1)
    started = time.monotonic()
    with pytest.raises(TimeLimitExceeded), limit.watch():
        limit.running = 0
        try:
            DEFAULT.apply(Document(text, {}))
        finally:
            limit.running = -1
    assert time.monotonic() - started < 10
