"""A mistake in a list of filters is one line; a filter may be outside the package."""

from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from tokamake.config import external_plugins
from tokamake.config.data import TokenizeSettings
from tokamake.config.filters import (
    check_filter_packages,
    filter_class,
    parse_filters,
    source_digest,
)
from tokamake.config_files import validate
from tokamake.data.corpus.corpora import read_corpora
from tokamake.data.filters.length import Filter as Length
from tokamake.errors import UserError

OUTSIDE = '''
from tokamake.data.filters import Document, DocumentFilter, Drop

class Filter(DocumentFilter):
    """Drop documents without a letter."""

    letter: str
    """The letter."""

    def apply(self, document: Document) -> Drop | None:
        return None if self.letter in document.text else Drop("no such letter")
'''


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([{"lenth": {}}], "lenth: unknown filter; did you mean length?"),
        (["gofer_quality"], "filters: gofer_quality: unknown filter; did you mean gopher_quality?"),
        (["spam"], "filters: spam: unknown filter; choose one of c4, "),
        ([{"length": {"min_char": 2}}], "length: min_char: unknown key; did you mean min_charac"),
        ([{"length": {"min_words": "x"}}], "length: min_words: 'x': give an integer of 0 or more"),
        ([{"length": {"min_words": -1}}], "length: min_words: -1: give an integer of 0 or more"),
        ([{"length": {}}], "length: no bound; give one of min_characters, max_characters, min_"),
        (["length"], "length: no bound; give one of"),
        ([{"length": 3}], "length: 3: give options as {OPTION: VALUE}"),
        ([{"length": {"min_words": 3, "max_words": 2}}], "min_words: 3: above max_words 2; swap"),
        ([{"length": {}, "regex": {}}], "give a filter as NAME: {OPTION: VALUE}"),
        ([{"regex": {"drop": "(a"}}], "regex: drop: '(a': not a regular expression (missing ),"),
        ([{"regex": {"drop": ""}}], "regex: drop: '': string should have at least 1 character"),
        ([{"regex": {}}], "regex: no expression; give one of keep, drop and replace"),
        ([{"regex": {"keep": "a", "drop": "a"}}], "regex: keep and drop; give one of keep, drop"),
        ([{"regex": {"replace": "a", "field": "b"}}], "field: b: replace changes the text; rem"),
        ([{"regex": {"drop": "a", "replacement": "b"}}], "replacement: b: no effect without rep"),
        ([{"regex": {"replace": "a", "replacement": r"\1"}}], r"replacement: \1: invalid group"),
        ([{"gone.py": {}}], "gone.py: no such file; paths of filters start from"),
        ("length: {min_words: 1", "filters:1: not valid YAML"),
    ],
)
def test_a_mistake_is_one_line(value: Any, message: str) -> None:
    with pytest.raises(UserError) as error:
        validate(TokenizeSettings, {"filters": value}, "config.yaml")
    assert str(error.value).startswith("config.yaml: filters")
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_options_are_kept_without_defaults() -> None:
    text = 'length: {min_words: 3}, regex: {drop: "a, b"}'
    expected = ({"length": {"min_words": 3}}, {"regex": {"drop": "a, b"}})
    assert parse_filters(text) == expected
    assert parse_filters('[{"length": {"min_words": 3}}, {"regex": {"drop": "a, b"}}]') == expected
    assert parse_filters("") == parse_filters("[]") == ()


def test_a_value_alone_sets_the_bare_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bare.py").write_text(
        OUTSIDE.replace("    letter:", '    bare_option = "letter"\n    letter:')
    )
    expected = ({"bare.py": {"letter": "a"}}, {"length": {"min_words": 3}})
    assert parse_filters("bare.py: a, length: {min_words: 3}") == expected
    assert parse_filters("bare.py: {letter: a}") == expected[:1]
    with pytest.raises(UserError, match=r"bare\.py: letter: 3: input should be a valid string"):
        parse_filters("bare.py: 3")


def test_a_package_that_is_missing_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("outside.py").write_text(
        OUTSIDE.replace("    letter:", "    packages = ('gone',)\n    letter:")
    )
    lacks = "needs gone, which this Python environment lacks"
    with pytest.raises(UserError) as error:
        check_filter_packages(parse_filters("length: {min_words: 3}, outside.py: {letter: a}"))
    assert str(error.value) == (f"filters: outside.py: {lacks}; install it, or remove the filter")
    monkeypatch.setattr(Length, "packages", ("gone", "json"))
    with pytest.raises(UserError) as error:
        check_filter_packages(parse_filters("length: {min_words: 3}"))
    assert str(error.value) == (
        f"filters: length: {lacks}; run `pip install 'tokamake[corpora]'`, or remove the filter"
    )


def test_a_row_of_the_table_has_filters_of_its_own(tmp_path: Path) -> None:
    table = tmp_path / "corpora.tsv"
    cells = ["length: {min_words: 3}", "[]", ""]
    rows = [f"c{number}\tx\t1\t{cell}" for number, cell in enumerate(cells)]
    table.write_text("\n".join(["corpus\tfiles\tweight\tfilters", *rows]) + "\n")
    filters = [corpus.filters for corpus in read_corpora(table)]
    assert filters == [({"length": {"min_words": 3}},), (), None]
    table.write_text("corpus\tfiles\tweight\tfilters\nc\tx\t1\tlength: {min_word: 3}\n")
    with pytest.raises(
        UserError, match=r"tsv:2: filters\.0: length: min_word: .* did you mean min"
    ):
        read_corpora(table)


def test_a_path_names_a_filter_outside_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(OUTSIDE)
    assert parse_filters("mine.py: {letter: a}") == ({"mine.py": {"letter": "a"}},)
    with pytest.raises(UserError, match=r"mine\.py: leter: unknown key; did you mean letter"):
        parse_filters("mine.py: {leter: a}")
    digest = source_digest("mine.py", {"letter": "a"})
    Path("mine.py").write_text(OUTSIDE + "\n")
    assert source_digest("mine.py", {"letter": "a"}) not in ("", digest)
    assert source_digest("length", {"min_words": 3}) == ""
    Path("cannot.py").write_text("import nothing_of_this_name")
    with pytest.raises(UserError, match=r"cannot\.py: .* \(ModuleNotFoundError.*fix the file"):
        filter_class("cannot.py")
    Path("empty.py").touch()
    with pytest.raises(UserError, match=r"empty\.py: has no class Filter, derived from Document"):
        filter_class("empty.py")


def test_an_entry_point_names_a_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    group = "tokamake.filters"
    points = [
        EntryPoint("short", "tokamake.data.filters.length", group),
        EntryPoint("class", "tokamake.data.filters.length:Filter", group),
        EntryPoint("gone", "nothing_of_this_name", group),
    ]
    monkeypatch.setattr(external_plugins, "entry_points", lambda **_: points)
    assert filter_class("short") is filter_class("class") is Length
    assert len(source_digest("short", {"min_words": 3})) == 64
    with pytest.raises(UserError, match=r"gone: cannot be imported .*; install its package"):
        filter_class("gone")
    with pytest.raises(UserError, match=r"choose one of .*regex, .*short, class, gone, or a"):
        filter_class("other")
