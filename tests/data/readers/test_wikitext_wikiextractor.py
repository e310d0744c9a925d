"""Our text of each kind of markup, against WikiExtractor's, which is recorded in tests/support.

WikiExtractor is no package of the tests, because its licence is the AGPL. To record again, after a
change of `CASES`:

    python -m venv extractor && extractor/bin/pip install wikiextractor==3.1.0
    python -c "from tests.data.readers.test_wikitext_wikiextractor import *; \\
        Path('small.xml').write_bytes(DUMP)"
    extractor/bin/python -m wikiextractor.WikiExtractor small.xml --json --no-templates \\
        --html-safe "" --bytes 100G -o tests/support/wikiextractor
"""

import html
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.support.readings import records
from tests.support.wikipedia_dumps import pages_of, xml
from tests.support.wikitext_cases import CASES
from tokamake.data.readers import open_input, sniff

RECORDED = Path(__file__).parents[2] / "support/wikiextractor/AA/wiki_00"
DUMP = xml(pages_of(len(CASES)))
DIFFERENT = {
    "it drops lists": r"^\*",
    "it drops links with a namespace, also with a label": r"\[\[(?:Help|doi|B):",
    "it drops templates, but evaluates functions": r"\{\{(?:lang\||convert|#if)",
    "it reads code as wikitext, and numbers formulas": r"<(?:nowiki|syntax|math|score)",
    "it drops the content of these tags": r"<small>|<noinclude>",
    "it knows no variants of a language, and English names only": r"-\{|__KEIN",
    "markup that is not closed is text": r"(?:<!-- |jpg\||<ref>)open|\n! head\n\n|\{\{\{\{b",
    "it drops lines of a table that has not begun": r"\| a left row",
}
"""Why words differ, with an expression for the wikitext."""


def test_output_of_wikiextractor_is_jsonl_with_the_fields_of_a_dump(tmp_path: Path) -> None:
    dump = tmp_path / "small.xml"
    dump.write_bytes(DUMP)
    raw = open_input(RECORDED)
    theirs, ours = records(raw), records(open_input(dump))
    assert (sniff(RECORDED)[0], raw.documents) == ("jsonl", len(CASES))
    assert [list(each) for each in theirs] == [list(each) for each in ours]
    assert raw.place(3) == f"{RECORDED}:3"
    assert theirs[2]["text"].startswith("Article 2 has words.\n")


def words(text: str) -> Counter[str]:
    return Counter(re.findall(r"\w+", text))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Counter[str], Counter[str]]]:
    """Our words and WikiExtractor's words of each page."""
    dump = tmp_path_factory.mktemp("dump") / "small.xml"
    dump.write_bytes(DUMP)
    ours, theirs = records(open_input(dump)), records(open_input(RECORDED))
    assert [(each["id"], each["url"], each["title"]) for each in ours] == [
        (each["id"], each["url"], html.unescape(each["title"])) for each in theirs
    ]
    return [
        (words(our["text"]), words(their["text"])) for our, their in zip(ours, theirs, strict=True)
    ]


def test_words_differ_for_known_reasons_only(
    pairs: list[tuple[Counter[str], Counter[str]]],
) -> None:
    for wikitext, (ours, theirs) in zip(CASES, pairs, strict=True):
        reasons = [why for why, mark in DIFFERENT.items() if re.search(mark, wikitext, re.M)]
        assert (ours != theirs) == bool(reasons), (wikitext, reasons, ours - theirs, theirs - ours)


def test_most_words_are_common(pairs: list[tuple[Counter[str], Counter[str]]]) -> None:
    """The page wikipedia.md has these counts."""
    assert len(pairs) == 57
    assert sum(ours == theirs for ours, theirs in pairs) == 34
    assert sum(ours.total() for ours, _ in pairs) == 425
    assert sum(theirs.total() for _, theirs in pairs) == 411
    assert sum((ours & theirs).total() for ours, theirs in pairs) == 381
