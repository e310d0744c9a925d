"""A mistake about a scorer is one line; a scorer may be outside the package."""

from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from tokamake.config import external_plugins
from tokamake.config.detoxify import DetoxifySettings
from tokamake.config.scorers import check_scorer_packages, load_scorer, source_digests
from tokamake.config_files import validate
from tokamake.errors import UserError

OUTSIDE = '''
from tokamake.detoxify.scorers import TextScorer

class ToxicityScorer(TextScorer):
    """A constant."""

    bare_option = "value"

    value: float
    """The score of all texts."""

    def score(self, texts):
        return [self.value for _ in texts]

def not_for_all(texts):
    return [0.5 for _ in texts]
'''


def entry(scorer: Any) -> dict[str, Any]:
    section = {"scorer": scorer, "prompts": "prompts.jsonl"}
    return validate(DetoxifySettings, section, "config.yaml").scorer


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("wordlist", "scorer: wordlist: unknown scorer; did you mean word_list?"),
        ("spam", "spam: unknown scorer; choose one of alt_profanity_check, column, word_"),
        ("word_list", "word_list: path: missing"),
        ({"word_list": {"file": "a"}}, "word_list: file: unknown key"),
        ({"alt_profanity_check": 1}, "alt_profanity_check: 1: give options as {OPTION: VALUE}"),
        ({"column": {"path": "a"}, "word_list": "b"}, "give a scorer as NAME: {OPTION: VALUE}"),
        ("gone.py:score", "gone.py: no such file; paths of scorers start from"),
        ("mine.py", "mine.py: has no function score; name one: mine.py:FUNCTION"),
        ({"mine.py:not_for_all": {"a": 1}}, "mine.py:not_for_all: a: a function has no options"),
    ],
)
@pytest.mark.usefixtures("mine")
def test_a_mistake_is_one_line(value: Any, message: str) -> None:
    with pytest.raises(UserError) as error:
        entry(value)
    assert str(error.value).startswith("config.yaml: scorer")
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 1


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(OUTSIDE)
    return Path("mine.py")


@pytest.mark.usefixtures("mine")
def test_entry_points_are_classes_or_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    load = external_plugins.import_file("mine.py", noun="scorers")
    points = [EntryPoint("constant", "mine:ToxicityScorer", "tokamake.scorers")]
    monkeypatch.setattr(external_plugins, "entry_points", lambda **_: points)
    monkeypatch.setattr(EntryPoint, "load", lambda _: load.ToxicityScorer)
    assert entry({"constant": 0.25}) == {"constant": {"value": 0.25}}
    name, score = load_scorer("{constant: 0.25}")
    assert (name, score(["a", "b"])) == ("constant", [0.25, 0.25])
    load.ToxicityScorer.packages = ("no_such_package",)
    for check in (check_scorer_packages, lambda _: load_scorer("{constant: 1}")):
        with pytest.raises(
            UserError, match=r"^constant: needs no_such_package, .*; install it, or"
        ):
            check({"constant": {"value": 1}})
    assert len(source_digests({"constant": {"value": 1}})) == 1


def test_contents_of_files_decide_the_digest(mine: Path) -> None:
    function = entry("mine.py:not_for_all")
    before = source_digests(function)
    mine.write_text(OUTSIDE + "# more\n")
    assert source_digests(function) != before
    assert source_digests(entry({"column": "scores.jsonl"})) == []
    with pytest.raises(UserError, match=r"^words.txt: cannot be read"):
        source_digests(entry({"word_list": "words.txt"}))


def test_a_missing_package_is_named_with_its_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external_plugins, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"pip install 'tokamake\[detoxify\]'"):
        check_scorer_packages(entry("alt_profanity_check"))
