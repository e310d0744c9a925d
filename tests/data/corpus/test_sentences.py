"""Splitting sentences loses no text, never panics, and takes linear time."""

import itertools
import random

import pytest

from tokamake.data.corpus import sentences
from tokamake.data.corpus.sentences import split

PIECES = [
    "A", "Vitamin", "b", " ", "\u00a0", "\u2028", "\u3000", "\u0085", "\n", "\r\n", "\n\n",
    "\n\r\n", ".", "...", "。", "!", "？", "؟", "।", '"', "'", "“", "”", "„", "«", "»", "「", "」",
    "(", ")", "[1]", "a@b.com", "1", "23.", "é", "Ä", "日本", "😀", "Dr.", "z.B.", "März", "``",
    "''", "\x1c",
]  # fmt: skip
LANGUAGES = ["en", "de", "zh", "ja", "fr", "ru", "fi", "kk", "hy", "am", "xx"]


def test_ordinary_text_is_split() -> None:
    result, counts = split(
        ["Mr. Smith came. He left!\n\nNew\nline here.  ", "", "你好。再见。"], "en"
    )
    assert result == ["Mr. Smith came.", "He left!", "New\nline here.", "你好。", "再见。"]
    assert counts.tolist() == [3, 0, 2]
    assert split(["Das ist z.B. gut. Am 3. März kam er."], "de")[1].tolist() == [2]


def test_multibyte_white_space_does_not_panic(capfd: pytest.CaptureFixture[str]) -> None:
    result, _ = split(["Vitamin A\u00a0. Next one.", "A\u2028\u3000. B\u00a0b."], "en")
    assert "".join("".join(result).split()) == "VitaminA.Nextone.A.Bb."
    assert "Next one." in result
    assert capfd.readouterr().err == ""


def test_no_text_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    for number in range(3000):
        monkeypatch.setattr(sentences, "_LONGEST", 16_000 if number % 2 else 16)
        monkeypatch.setattr(sentences, "_WINDOW", 4_000 if number % 2 else 8)
        text = "".join(rng.choices(PIECES, k=rng.randrange(30)))
        result, _ = split([text], rng.choice(LANGUAGES))
        end = 0
        for sentence in result:
            assert sentence == sentence.strip() != ""
            start = text.index(sentence, end)
            assert not text[end:start].strip()
            end = start + len(sentence)
        assert not text[end:].strip()


def test_after_a_panic_the_text_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import sentencex

    class PanicException(BaseException):
        """The exception of Rust packages with a bug."""

    def panic(language: str, text: str) -> list[str]:
        raise PanicException("not a char boundary")

    monkeypatch.setattr(sentencex, "segment", panic)
    assert split([" One. Two. "], "en")[0] == ["One. Two."]
    monkeypatch.setattr(sentencex, "segment", lambda *_: ["One."])
    assert split(["One. Two."], "en")[0] == ["One. Two."]


def test_long_paragraphs_are_split_in_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    import sentencex

    segment, seen = sentencex.segment, []

    def note(language: str, text: str) -> list[str]:
        seen.append(len(text))
        return segment(language, text)

    monkeypatch.setattr(sentencex, "segment", note)
    assert split(["你好。" * 100_000], "zh")[1].tolist() == [100_000]
    # The time of sentencex grows with the square of the length: 300,000 characters took minutes.
    assert max(seen) <= 16_000
    assert sum(seen) < 1.5 * 300_000
    long = [f"Number {n} is here" + end for n in range(5000) for end in (". ", "! ", "?\n")]
    assert split(["".join(long)], "en")[0] == [sentence.strip() for sentence in long]
    for endless, separator in (("word " * 20_000, " "), ("x" * 100_000, "")):
        result, _ = split([endless], "en")
        assert separator.join(result) == endless.strip()
        assert max(map(len, result)) <= sentences._LONGEST


def test_windows_do_not_change_sentences() -> None:
    import sentencex

    rng = random.Random(1)
    words = ["".join(rng.choices("abcdefg", k=rng.randrange(2, 9))) for _ in range(99)]
    marks = itertools.cycle([". ", ".\n", "! ", '" he said. ', "。"])
    text = "".join(
        ('"' * (mark[0] == '"') + " ".join(rng.choices(words, k=8))).capitalize() + mark
        for mark in itertools.islice(marks, 2000)
    )
    expected = [part.strip() for part in sentencex.segment("en", text)]
    assert len(text) > 4 * sentences._LONGEST
    assert split([text], "en")[0] == expected
