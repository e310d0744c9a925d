"""datatrove 0.10.1 decides as our filters do; only its way to split words makes a difference."""

import sysconfig
from pathlib import Path

import pytest

from tests.support.datatrove_filters import CLASSES, filter_of, our_words
from tests.support.filters import verdict
from tests.support.text_quality import random_texts
from tokamake.config.filters import filter_class

pytestmark = pytest.mark.extra("oracles", "datatrove", "spacy")


def documents() -> list[str]:
    """Real documents of this machine: Python's sources and their docstrings, and licenses."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    licenses = sorted(Path("/usr/share/doc").glob("*/copyright"))
    readmes = sorted(Path(sysconfig.get_path("purelib")).glob("*.dist-info/METADATA"))
    paths = [*sources[:50], *licenses[:75], *readmes[:75]]
    texts = [path.read_text(errors="ignore")[:8_000] for path in paths]
    return [text for text in texts if text]


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return documents()


@pytest.mark.parametrize("name", CLASSES)
def test_with_equal_words_everything_is_equal(name: str, texts: list[str]) -> None:
    """The verdict, its reason and the text that is left, also of texts that no rule expects."""
    ours, theirs = filter_class(name)(), filter_of(name)
    with our_words():
        for text in [*texts, *random_texts(seed=2, number=300)]:
            assert verdict(ours, text) == theirs(text)


@pytest.mark.parametrize("name", CLASSES)
def test_with_spacys_words_few_verdicts_differ(name: str, texts: list[str]) -> None:
    ours, theirs = filter_class(name)(), filter_of(name)
    decisions = [(verdict(ours, text)[0] is None, theirs(text)[0] is None) for text in texts]
    assert sum(kept != other for kept, other in decisions) <= 0.03 * len(texts)


def test_rules_of_c4_can_be_switched_off(texts: list[str]) -> None:
    ours = filter_class("c4")(end_marks=False, remove_citations=False, drop_curly_brackets=False)
    theirs = filter_of(
        "c4", filter_no_terminal_punct=False, remove_citations=False, filter_curly_bracket=False
    )
    with our_words():
        assert [verdict(ours, text) for text in texts] == list(map(theirs, texts))
