"""lib/csrc scores languages as fastText does."""

import random
import sysconfig
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.languages import SENTENCES, fasttext_scores, model
from tokamake._csrc import LanguageModel
from tokamake.data.filters.language import _model_path

WORDS = [word for pair in SENTENCES.values() for sentence in pair for word in sentence.split()]
PIECES = [
    *(
        " ",
        "\t",
        "\n",
        "\r",
        "\v",
        "\f",
        "\0",
        "\x85",
        "\xa0",
        "\u2028",
        "\ufeff",
        "\ufffd",
        "\x7f",
    ),
    *(
        "<",
        ">",
        "</s",
        "</s>",
        "__label__",
        "__label__en",
        "__label__none",
        "😀",
        "👩\u200d🚀",
        "e\u0301",
    ),
    *("a", "é", "中", "ช", "\U0010ffff", "x" * 26, "x" * 27, "x" * 28, "né" * 40, "日本語" * 20),
]


def assert_equal_scores(text: str) -> None:
    """The same best label, and no score that differs by 1e-4."""
    expected, found = fasttext_scores(text), model().scores(text)
    labels = model().labels
    theirs = np.array([expected.get(label, 0.0) for label in labels])
    assert np.abs(found - theirs).max() < 1e-4, text
    assert labels[found.argmax()] == labels[theirs.argmax()], text


@pytest.mark.parametrize("code", SENTENCES)
def test_sentences_and_their_parts(code: str) -> None:
    for sentence in SENTENCES[code]:
        for size in range(len(sentence) + 1):
            assert_equal_scores(sentence[:size])


def test_words_of_all_languages_in_any_order() -> None:
    chance = random.Random(1)
    for _ in range(800):
        assert_equal_scores(" ".join(chance.choices(WORDS, k=chance.randint(1, 60))))


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from([*PIECES, *WORDS[::5]]), max_size=30).map("".join) | st.text())
def test_nasty_texts(text: str) -> None:
    assert_equal_scores(text)


def test_real_texts() -> None:
    """Python's sources, and descriptions of packages."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    descriptions = sorted(Path(sysconfig.get_path("purelib")).glob("*.dist-info/METADATA"))
    for path in [*sources, *descriptions]:
        assert_equal_scores(path.read_text(errors="replace")[:6_000])


def test_long_texts() -> None:
    for text in (" ".join(WORDS) * 600, "abc " * 250_000, "中文" * 100_000):
        assert_equal_scores(text)


def test_the_cache_changes_nothing() -> None:
    """More words than the cache has room for, forwards and backwards, and in a new model."""
    words = [f"{word}{number}" for number in range(300) for word in WORDS]
    texts = [" ".join(words[start : start + 200]) for start in range(0, len(words), 200)]
    first = [model().scores(text) for text in texts]
    again = [model().scores(text) for text in reversed(texts)]
    np.testing.assert_array_equal(first, again[::-1])
    for text, scores in zip(texts[::50], first[::50], strict=True):
        fresh = LanguageModel(_model_path().read_bytes())
        np.testing.assert_array_equal(fresh.scores(text), scores)


def test_threads_share_a_model() -> None:
    texts = [" ".join(WORDS[start:]) * 20 for start in range(200)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(model().scores, texts))
    np.testing.assert_array_equal(found, [model().scores(text) for text in texts])


def test_other_threads_run_meanwhile() -> None:
    thread = threading.Thread(target=model().scores, args=("word of a text. " * 2_000_000,))
    thread.start()
    steps = 0
    while thread.is_alive():
        steps += 1
        time.sleep(0)
    thread.join()
    assert steps > 10


@pytest.mark.parametrize("part", ["a", "é中 ", "ab ", "<", "</s", "</s>", "\0"])
def test_long_texts_take_linear_time(part: str) -> None:
    text = part * (4_000_000 // len(part))
    start = time.process_time()
    model().scores(text)
    assert time.process_time() - start < 10  # below 1 s; quadratic time is hours


def test_a_lone_surrogate_is_an_error() -> None:
    with pytest.raises(UnicodeEncodeError):
        model().scores("a\ud800")


def test_other_files_are_refused() -> None:
    """Also each beginning of the model, and random bytes instead of its shape."""
    content = _model_path().read_bytes()
    sizes = [*range(0, 400), *range(400, len(content), 9973), len(content) - 1]
    for damaged in [*(content[:size] for size in sizes), content + b"x", b"x" * 900]:
        with pytest.raises(ValueError, match="no model of languages that this reader knows"):
            LanguageModel(damaged)
    chance = random.Random(1)
    for place in range(100):
        changed = bytearray(content)
        changed[place] = chance.randrange(256)
        with suppress(ValueError):
            LanguageModel(bytes(changed)).scores("Any text.")
