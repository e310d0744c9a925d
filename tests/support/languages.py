"""Sentences of 17 languages, and fastText as the oracle of the filter `language`."""

from functools import cache
from typing import Any

from tokamake._csrc import LanguageModel
from tokamake.data.filters.language import _load_model, _model_path

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
"""Sentences written for these tests."""


def model() -> LanguageModel:
    """Return the model that the filter uses."""
    return _load_model(_model_path())


def fasttext_scores(text: str) -> dict[str, float]:
    """Return fastText's probability of each label; its text ends at a line feed and at </s>."""
    line = text.replace("\n", " ").replace("</s>", " ") + "\n"
    predictions = _fasttext().predict(line, -1, 0.0, "strict")
    return {label.removeprefix("__label__"): score for score, label in predictions}


@cache
def _fasttext() -> Any:
    from fasttext import load_model

    return load_model(str(_model_path())).f
