"""Vocabularies and byte-level BPE in lib/csrc: they read JSON and check their arguments."""

import itertools
import json
import random
from typing import Any

import numpy as np
import pytest

from tests.support.tokenizer_texts import random_texts
from tokamake._csrc import BytePairs, TextEncoder, Vocabulary, WordPieces, model_spans


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("ascii_only", [True, False])
def test_a_vocabulary_reads_the_json_of_a_definition(indent: int | None, ascii_only: bool) -> None:
    words = dict.fromkeys(random_texts(300, seed=4), 0) | {'"\\/\b\f\t': 0, "]},{": 0}
    words = {word: 3 * number for number, word in enumerate(words) if word}
    sides = random.Random(2).choices([*words], k=200)
    pairs = [*itertools.pairwise(sides)]
    words |= {a + b: 5000 + rank for rank, (a, b) in enumerate(pairs)}
    model = {"merges": pairs, "x": [{"vocab": 1}, 1e5], "vocab": words}
    definition = json.dumps(
        {"a": {"model": 0}, "model": model, "b": None}, indent=indent, ensure_ascii=ascii_only
    ).encode()
    spans = model_spans(definition)
    assert spans is not None
    (vocab, merges), highest = ([definition[slice(*span)] for span in spans[:2]]), spans[2]
    assert json.loads(vocab) == words
    assert json.loads(merges) == [[*pair] for pair in pairs]
    assert highest == max(words.values())
    found = Vocabulary(vocab, merges)
    assert {word: found.id(word) for word in words} == words
    assert found.id("no such word") is None
    expected = [[words[a], words[b], words[a + b]] for a, b in pairs]
    assert found.merges().tolist() == expected
    characters = [(word.encode(), number) for word, number in words.items() if len(word) == 1]
    assert found.characters() == characters


def test_a_vocabulary_reads_merges_in_one_string_and_refuses_others() -> None:
    vocab = b'{"a": 1, "b": 2, "ab": 3}'
    assert Vocabulary(vocab, b'["a b"]').merges().tolist() == [[1, 2, 3]]
    for merges in (b'["ab"]', b'["a b c"]', b'[["a"]]', b'[["a", "c"]]', b'["a b', b"{}", b"[1]"):
        with pytest.raises(ValueError, match=r"merge|string"):
            Vocabulary(vocab, merges)
    for text in (b"", b"[]", b'{"model": {"vocab": {"a": -1}, "merges": []}}', b'{"model": 1}'):
        assert model_spans(text) is None


def test_byte_pairs_check_their_arguments() -> None:
    classes, singles = np.zeros(0x110000, np.uint8), np.arange(256, dtype=np.uint32)
    transitions = np.array([[0, 0], [0, 0]], np.uint16)
    no_merges = np.empty((0, 3), np.uint32)
    no_marks = np.empty(0, np.uint8)

    def make(
        classes: np.ndarray = classes,
        transitions: np.ndarray = transitions,
        singles: np.ndarray = singles,
        merges: np.ndarray = no_merges,
        added: tuple[tuple[str, int, int], ...] = (),
        marks: np.ndarray = no_marks,
        **options: Any,
    ) -> TextEncoder:
        return TextEncoder(
            BytePairs(singles, merges),
            splits=[(classes, transitions, True, True)],
            added=list(added),
            marks=marks,
            **options,
        )

    assert make().encode(["aé", "", "\0"], str)[0].tolist() == [97, 195, 169, 0]
    with pytest.raises(ValueError, match="0x110000"):
        make(classes=classes[:-1])
    with pytest.raises(ValueError, match="class is too large"):
        make(classes=classes + np.uint8(1))
    with pytest.raises(ValueError, match="two dimensions"):
        make(transitions=transitions[0])
    with pytest.raises(ValueError, match="each state"):
        make(transitions=transitions[:1])
    with pytest.raises(ValueError, match="names no state"):
        make(transitions=transitions + np.uint16(8))
    with pytest.raises(ValueError, match="empty text"):
        make(transitions=transitions + np.uint16(1))
    with pytest.raises(ValueError, match="a mark for each"):
        make(marks=classes[:-1])
    numbers = np.zeros(0x110000, np.uint32)
    with pytest.raises(ValueError, match="an entry for each"):
        make(after=(numbers[1:], [""], no_marks))
    with pytest.raises(ValueError, match="a text that it lacks"):
        make(before=(numbers + np.uint32(1), [""], no_marks))
    with pytest.raises(ValueError, match="a kind for each"):
        WordPieces(Vocabulary(b"{}", b"[]"), prefix="", unknown=0, longest=1, kinds=no_marks)
    with pytest.raises(ValueError, match="256 bytes"):
        make(singles=singles[1:])
    with pytest.raises(ValueError, match="three columns"):
        make(merges=no_merges.reshape(0, 2))
    with pytest.raises(ValueError, match="same pair"):
        make(merges=np.array([[1, 2, 256], [1, 2, 257]], np.uint32))
    for merge in ([1, 2, 2**21], [2**32 - 1, 2, 3]):
        with pytest.raises(ValueError, match="21 bits"):
            make(merges=np.array([merge], np.uint32))
    with pytest.raises(ValueError, match="256 \\* 256"):
        make(joints=np.ones(7, np.uint8))
    with pytest.raises(ValueError, match="unknown prefix"):
        make(prefix="first")
    with pytest.raises(ValueError, match="not empty"):
        make(added=(("", 1, 0),))
    with pytest.raises(ValueError, match="a letter for each"):
        make(added=(("a", 1, 4),))
    with pytest.raises(ValueError, match="words are normalized"):
        make(later=[("a", 1, 0)], normalizes_words=True)
    with pytest.raises(TypeError):
        make(singles=singles.astype(np.int64))
    with pytest.raises(UnicodeEncodeError):
        make().encode(["\ud800"], str)
