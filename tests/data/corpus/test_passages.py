"""Passages of texts have the spans of plain Python; cuts leave the right white space."""

import random
import re

import pytest

from tokamake.config.repeats import RepeatSettings
from tokamake.config_files import validate
from tokamake.data.corpus.passages import make_finder, without
from tokamake.errors import UserError


def found(text: str, **settings: object) -> list[str]:
    passages = make_finder(RepeatSettings(**settings))(text)  # type: ignore[arg-type]
    assert len(passages.hashes) == len(passages.spans)
    return [text[begin:end] for begin, end in passages.spans.tolist()]


def test_lines_and_paragraphs_are_stripped_and_long_enough() -> None:
    text = "\n one line\r\n\tanother line \nshort\n \n\n\nlast\none\n"
    assert found(text, unit="lines", min_characters=6) == ["one line", "another line"]
    paragraphs = ["one line\r\n\tanother line \nshort", "last\none"]
    assert found(text, unit="paragraphs", min_characters=1) == paragraphs
    assert found(text, unit="paragraphs", min_characters=9) == paragraphs[:1]
    assert found("", unit="lines", min_characters=1) == []
    assert found(" \n \n ", unit="paragraphs", min_characters=1) == []


def test_equal_lines_have_equal_hashes_and_others_have_not() -> None:
    find = make_finder(RepeatSettings(unit="lines", min_characters=1))
    hashes = find("é a\n  é a\t\né b").hashes.tolist()
    assert hashes[0] == hashes[1] != hashes[2]


def test_all_sequences_of_words_without_edges() -> None:
    text = "(One) two, three. Four"
    sequences = ["One) two, three.", "two, three. Four"]
    assert found(text, unit="words", min_words=3, edge_words=0) == sequences
    assert found(text, unit="words", min_words=5, edge_words=0) == []
    assert found("一二三。四", unit="words", min_words=3, edge_words=0) == ["一二三。", "二三。四"]
    find = make_finder(RepeatSettings(unit="words", min_words=2, edge_words=0))
    hashes = find("A b. a, B a").hashes.tolist()
    assert hashes[0] == hashes[2]  # case and punctuation do not count
    assert hashes[1] == hashes[3] != hashes[0]


@pytest.mark.parametrize(("min_words", "edge_words"), [(12, 4), (9, 4), (5, 1)])
def test_texts_with_a_long_shared_run_choose_windows_that_cover_it(
    min_words: int, edge_words: int
) -> None:
    """The promise of winnowing, for many random runs in different surroundings."""
    numbers = random.Random(3)
    find = make_finder(RepeatSettings(unit="words", min_words=min_words, edge_words=edge_words))
    size = min_words - edge_words

    def around(run: list[str]) -> tuple[dict[int, int], int]:
        """Hash → first word of the windows that lie in the run; number of windows of the text."""
        words = [f"x{numbers.random()}".replace(".", "") for _ in range(numbers.randrange(30))]
        before = len(words)
        words += [*run, *(f"y{numbers.randrange(10**9)}" for _ in range(numbers.randrange(30)))]
        text = " ".join(words)
        passages = find(text)
        firsts = [text[:begin].count(" ") - before for begin in passages.spans[:, 0].tolist()]
        inside = {
            hashed: first
            for hashed, first in zip(passages.hashes.tolist(), firsts, strict=True)
            if 0 <= first <= len(run) - size
        }
        return inside, len(firsts)

    for _ in range(200):
        length = min_words + numbers.randrange(40)
        run = [f"w{numbers.randrange(10**9)}" for _ in range(length)]
        (one, count), (other, _) = around(run), around(run)
        shared = sorted(one[hashed] for hashed in one.keys() & other.keys())
        assert shared
        covered = {word for first in shared for word in range(first, first + size)}
        assert covered >= {*range(edge_words, length - edge_words)}
        assert count <= length + 60


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("a\n[cut]\nb", "a\nb"),
        ("a\n\n[cut]\n\nb", "a\n\nb"),
        ("a\n\n[cut]\n  b\n", "a\n\n  b\n"),
        ("  a\n    [cut]\n        b", "  a\n        b"),
        ("a [cut] b", "a b"),
        ("a [cut]b", "a b"),
        ("a. [cut]\n\nb", "a.\n\nb"),
        ("a\n\n[cut] b", "a\n\nb"),
        ("[cut]\n\n  b", "  b"),
        ("[cut] b", "b"),
        ("a\n[cut]", "a"),
        ("a\n[cut]\n", "a\n"),
        ("a\n[cut]\n\n[cut]\n b", "a\n\n b"),
        ("[cut] [cut]\n[cut]", ""),
        ("一[cut]二", "一二"),
    ],
)
def test_white_space_around_cuts(text: str, left: str) -> None:
    spans = [match.span() for match in re.finditer(r"\[cut\]", text)]
    assert without(text, spans) == left


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_words": 9, "edge_words": 5, "unit": "words"}, "edge_words: 5: not below half of"),
        ({"min_words": 60}, "min_words: 60: no effect on unit lines; remove it"),
        ({"unit": "words", "min_characters": 60}, "min_characters: 60: no effect on unit words"),
        ({"unit": "sentences"}, "unit"),
    ],
)
def test_settings_without_effect_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        validate(RepeatSettings, settings, "repeats")
