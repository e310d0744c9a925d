"""RACE: articles with questions. Each question has four options."""

import json
from pathlib import Path

import pytest

from tokamake.errors import UserError
from tokamake.finetune.tasks.race import read

OPTIONS = ["a", "b", "c", "d"]


def write(folder: Path, value: object) -> Path:
    path = folder / "high1.txt"
    path.write_text(json.dumps(value) + "\n")
    return path


def test_an_option_takes_the_place_of_the_underscore_or_follows(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {
            "article": "Long ago.",
            "questions": ["It is _ .", "What is it?"],
            "options": [OPTIONS, OPTIONS],
            "answers": ["B", "D"],
            "id": "high1.txt",
        },
    )
    first, second = read(path, {})
    assert first.firsts == ("It is a .", "It is b .", "It is c .", "It is d .")
    assert second.firsts == tuple(f"What is it? {option}" for option in OPTIONS)
    assert (first.second, first.label, second.label) == ("Long ago.", "B", "D")


def test_answers_may_be_missing(tmp_path: Path) -> None:
    value = {"article": "A", "questions": ["Q"], "options": [OPTIONS]}
    assert [example.label for example in read(write(tmp_path, value), {})] == [None]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"article": "A", "questions": ["Q"]}, "has no article, questions, options"),
        (
            {"article": "A", "questions": ["Q"], "options": [OPTIONS], "answers": []},
            "as many of each",
        ),
        ({"article": "A", "questions": ["Q"], "options": [["a"]]}, "has 1 options, not 4"),
    ],
)
def test_damaged_lines_are_named(tmp_path: Path, value: object, message: str) -> None:
    with pytest.raises(UserError, match=rf"high1.txt:1: .*{message}"):
        [*read(write(tmp_path, value), {})]
