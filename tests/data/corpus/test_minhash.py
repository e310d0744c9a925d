"""Words that band keys are made of."""

import pytest

from tokamake.config.data import TokenizeSettings
from tokamake.config.near_duplicates import PRESETS, MinHashSettings, NearDuplicateSettings
from tokamake.config_files import validate
from tokamake.data.corpus.minhash import make_minhash
from tokamake.errors import UserError

ONE = MinHashSettings(bands=1, rows=1)


@pytest.mark.parametrize(
    ("text", "other", "is_equal"),
    [
        ("One two-three, four.", "ONE TWO THREE FOUR", True),
        ("Ärger über Ünde", "ärger\u00a0ÜBER ünde", True),
        ("ПРИВЕТ мир", "привет — МИР", True),
        ("a1 b2", "a1b2", False),
        ("naïve", "naive", False),
        ("e\u0301", "e", False),  # a mark is part of a word
        ("我爱北京", "我 爱 北 京", True),  # letters without spaces are words
        ("我爱北京", "我爱南京", False),
        ("ひらカタ", "ひ ら カ タ", True),
        ("한국어", "한 국 어", False),  # Korean has spaces
        ("\U00020000\U00020001", "\U00020000 \U00020001", True),
        ("price: 5 $", "price 5", True),
    ],
)
def test_words_are_runs_of_letters_marks_and_digits(text: str, other: str, is_equal: bool) -> None:
    keys = make_minhash(ONE).sign([text, other])
    assert (keys[0] == keys[1]).all() == is_equal


def test_characters_are_those_of_words_with_single_spaces() -> None:
    minhash = make_minhash(MinHashSettings(bands=1, rows=8, shingle=3, unit="characters"))
    keys = minhash.sign(["Ab, cd", " ab  CD!", "abcd", "ab c d"])[:, 0]
    assert keys[0] == keys[1]
    assert len({*keys.tolist()}) == 3


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fineweb", NearDuplicateSettings()),
        ("slimpajama", NearDuplicateSettings(bands=9, rows=13, shingle=13, unit="characters")),
        ("redpajama-0.8", NearDuplicateSettings(bands=9, rows=13, shingle=13)),
    ],
)
def test_a_preset_is_named_in_place_of_the_section(
    name: str, expected: NearDuplicateSettings
) -> None:
    settings = validate(TokenizeSettings, {"near_duplicates": name}, "tokenize")
    assert settings.near_duplicates == expected


def test_the_presets_of_redpajama_find_half_near_their_similarity() -> None:
    """RedPajama-V2 chose bands and rows of 128 hashes by the similarity to find."""
    for name, settings in PRESETS.items():
        if name.startswith("redpajama-"):
            minhash = MinHashSettings(**settings)
            assert minhash.bands * minhash.rows <= 128
            assert abs((1 / minhash.bands) ** (1 / minhash.rows) - float(name[-3:])) < 0.05


def test_an_unknown_preset_is_refused() -> None:
    with pytest.raises(UserError, match="dolma: unknown preset; choose one of fineweb"):
        validate(TokenizeSettings, {"near_duplicates": "dolma"}, "tokenize")


def test_a_preset_has_the_probabilities_of_its_corpus() -> None:
    fineweb = MinHashSettings()
    assert [round(fineweb.probability(j), 2) for j in (0.7, 0.8, 0.9)] == [0.56, 0.92, 1.0]
