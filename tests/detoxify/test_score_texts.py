"""Scorers, and checks of what a scorer returns."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tokamake.config.scorers import load_scorer, open_scorer
from tokamake.detoxify.score_texts import score_all, score_texts
from tokamake.errors import UserError

TEXTS = ["What the HECK is it?", "heckle", "  ", "Not  so\nnice.", "fine"]


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder has a file of texts, and a list of words."""
    monkeypatch.chdir(tmp_path)
    Path("words.txt").write_text("# words\nheck\nso nice\n")
    lines = [json.dumps({"text": text, "id": number}) for number, text in enumerate(TEXTS)]
    Path("texts.jsonl").write_text("\n".join(lines) + "\n")
    return Path("texts.jsonl")


def scores(path: Path, scorer: Any) -> list[float | None]:
    score_texts(path, scorer=json.dumps(scorer), output=Path("scored.jsonl"))
    lines = [json.loads(line) for line in Path("scored.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines] == [*range(len(TEXTS))]
    return [line["toxicity"] for line in lines]


def test_words_and_phrases_are_found_as_whole_words(texts: Path) -> None:
    assert scores(texts, {"word_list": "words.txt"}) == [1, 0, None, 1, 0]
    assert scores(texts, {"word_list": {"path": "words.txt"}}) == [1, 0, None, 1, 0]


def test_scores_of_another_program_are_looked_up_by_text(texts: Path) -> None:
    values = [0.5, 0.25, 1, None, 0.75]
    lines = [{"all_text": t, "score": {"t": v}} for t, v in zip(TEXTS, values, strict=True)]
    Path("scores.jsonl").write_text("".join(json.dumps(each) + "\n" for each in reversed(lines)))
    options = {"path": "scores.jsonl", "text_key": "all_text", "key": "score.t"}
    assert scores(texts, {"column": options}) == [0.5, 0.25, None, None, 0.75]
    Path("scores.jsonl").write_text(json.dumps(lines[0]) + "\n")
    with pytest.raises(
        UserError,
        match=r"texts.jsonl: scorer column: scores.jsonl: no score of the text 'heckle'; add",
    ):
        scores(texts, {"column": options})
    options["key"] = "score.u"
    with pytest.raises(UserError, match=r"scores.jsonl:1.*: no field 'u'; fix the file or the k"):
        scores(texts, {"column": options})


def test_scores_that_another_program_has_changed_are_noticed(texts: Path) -> None:
    def write(values: list[float | None], *, times: tuple[int, int] = (2**31, 2**31)) -> bool:
        lines = [{"text": t, "toxicity": v} for t, v in zip(TEXTS, values, strict=False)]
        Path("scores.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
        os.utime("scored.jsonl", times)
        return bool(open_scorer({"column": {"path": "scores.jsonl"}}).has_changed(scored))

    values, scored = [0.5, 0.25, 1, None, 0.75], Path("scored.jsonl")
    scored.touch()
    write(values)
    scores(texts, {"column": "scores.jsonl"})
    assert not write(values, times=(0, 0))
    assert not write(values[:2], times=(0, 0))
    assert write([0.5, 0.25, 1, None, 0.5], times=(0, 0))
    assert write([0.5, 0.25, 1, 0, 0.75], times=(0, 0))
    assert not write([1] * 5)  # older than the scored texts
    Path("scores.jsonl").unlink()
    assert not open_scorer({"column": {"path": "scores.jsonl"}}).has_changed(scored)


def test_a_function_of_a_file_scores(texts: Path) -> None:
    Path("function.py").write_text(
        "def score(texts):\n    return [len(each) / 100 for each in texts]\n"
    )
    expected = [len(text) / 100 if text.strip() else None for text in TEXTS]
    assert scores(texts, "function.py:score") == scores(texts, "function.py") == expected


@pytest.mark.extra("detoxify", "profanity_check")
def test_the_worst_sentence_decides() -> None:
    _, score = load_scorer("alt_profanity_check")
    plain = "The weather is nice today. " * 40
    insulted, quiet = score([f"{plain}You are a stupid idiot! {plain}", plain])
    assert insulted > 0.9
    assert quiet < 0.2


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([0.5], "s: 1 scores for 2 texts; return one for each"),
        ([0.5, 1.5], "s: 1.5 for the text 'b'; return a number from 0 to 1, or None"),
        ([float("nan"), 0], "s: nan for the text 'a'; return"),
        (["x", 0], "s: 'x' for the text 'a'; return"),
        (None, r"s: failed \(TypeError: .*\); fix the scorer"),
    ],
)
def test_wrong_results_are_one_line(returned: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        score_all(["a", "", "b"], lambda _: returned, name="s")
    assert "\n" not in str(error.value)
    assert score_all(["a", " ", "b"], lambda _: [None, 1], name="s") == [None, None, 1]


def test_files_that_are_wrong_are_named(texts: Path) -> None:
    Path("words.txt").write_text("# nothing\n")
    with pytest.raises(UserError, match=r"^words.txt: no word; write one in each line"):
        scores(texts, {"word_list": "words.txt"})
    with pytest.raises(UserError, match=r"^gone.txt: cannot be read"):
        scores(texts, {"word_list": "gone.txt"})
    texts.write_text('{"text": "a"}\n{"txt": "b"}\n')
    Path("words.txt").write_text("b\n")
    with pytest.raises(UserError, match=r"^texts.jsonl:2: not an object with a text"):
        score_texts(texts, scorer="{word_list: words.txt}", output=Path("none.jsonl"))
    assert not Path("none.jsonl").exists()
