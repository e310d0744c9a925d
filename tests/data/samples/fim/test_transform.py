"""Rearranged documents of a sample, with a tokenizer whose tokens are bytes."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tokamake.config.train_sections import FimSettings
from tokamake.data.samples.fim.tokens import FimTokens
from tokamake.data.samples.fim.transform import FimSegment, Rearranger, SampleRandom
from tokamake.errors import UserError

EOD, PREFIX, SUFFIX, MIDDLE, SEPARATOR = range(256, 261)
TOKENIZER: Any = SimpleNamespace(
    vocab_size=261,
    eod=EOD,
    decode=lambda ids: bytes(ids).decode(errors="replace"),
    encode_batch=lambda texts: [[*text.encode()] for text in texts],
)


class Scripted(SampleRandom):
    """Random numbers that a test states: answers of `happens`, then results of `below`."""

    def __init__(self, happens: Sequence[bool] = (), below: Sequence[int] = ()) -> None:
        self.answers, self.numbers = [*happens], [*below]
        self.bounds: list[int] = []

    def happens(self, _: float) -> bool:
        return self.answers.pop(0)

    def below(self, bound: int) -> int:
        self.bounds.append(bound)
        return self.numbers.pop(0)


def rearranger(*, split: bool = False, **settings: float) -> Rearranger:
    special = [EOD, PREFIX, SUFFIX, MIDDLE, SEPARATOR]
    marks = FimTokens(PREFIX, SUFFIX, MIDDLE, SEPARATOR if split else None, special)
    return Rearranger(FimSettings(**{"rate": 1.0, **settings}), TOKENIZER, marks=marks)


def tokens(*parts: str | int) -> Any:
    """Tokens of texts and of special tokens."""
    ids = (part.encode() if isinstance(part, str) else [part] for part in parts)
    return np.array([token for each in ids for token in each], np.int64)


def joined(parts: list[FimSegment]) -> list[int]:
    return [token for part in parts for token in part.tokens.tolist()]


@pytest.mark.parametrize(
    ("suffix_first", "expected"),
    [
        (False, (PREFIX, "ab", SUFFIX, "ef", MIDDLE, "cd", EOD)),
        (True, (PREFIX, SUFFIX, "ef", MIDDLE, "ab", "cd", EOD)),
    ],
)
def test_the_middle_of_a_document_moves_to_its_end(suffix_first: bool, expected: Any) -> None:
    random = Scripted([True, suffix_first, False], [4, 2])  # the cuts come in any order
    parts = rearranger()(tokens("abcdef", EOD), random)
    assert joined(parts) == tokens(*expected).tolist()
    assert random.bounds == [7, 7]  # both ends of a text are places to cut


def test_documents_are_chosen_one_by_one() -> None:
    sample = tokens("ab", EOD, "cd", EOD, "ef")
    random = Scripted([False, True, False, False], [0, 2])
    parts = rearranger()(sample, random)
    assert joined(parts) == tokens("ab", EOD, PREFIX, SUFFIX, MIDDLE, "cd", EOD, "ef").tolist()
    assert not random.answers


def test_kept_tokens_and_cut_fragments_know_their_place() -> None:
    parts = rearranger()(tokens("ab", EOD, "cdé"), Scripted([False, True, False], [1, 2]))
    kept = [(part.start, part.tokens.tolist()) for part in parts[:2]]
    assert kept == [(0, [*b"ab"]), (2, [EOD])]
    cut = [(part.start, part.unit, part.text) for part in parts if part.original is not None]
    assert cut == [(3, 0, "c"), (3, 2, "é"), (3, 1, "d")]
    assert all(part.start is None for part in parts if part.tokens.tolist() == [MIDDLE])
    assert all(
        part.original.tolist() == [*"cdé".encode()] for part in parts if part.original is not None
    )


def test_an_empty_document_needs_no_random_number() -> None:
    assert joined(rearranger()(tokens(EOD, EOD), Scripted())) == [EOD, EOD]


def test_fragments_of_a_split_document_are_chosen_one_by_one() -> None:
    sample = tokens("ab", SEPARATOR, SEPARATOR, "cd", EOD)
    random = Scripted([True, False, True, False], [0, 1])  # none for the empty fragment
    parts = rearranger(split=True)(sample, random)
    rearranged = (PREFIX, SUFFIX, "d", MIDDLE, "c")
    assert joined(parts) == tokens("ab", SEPARATOR, SEPARATOR, *rearranged, EOD).tolist()
    assert not random.answers
    starts = [part.start for part in parts if part.original is None and part.start is not None]
    assert starts == [0, 2, 3, 3, 6, 6, 7, 7]


def test_special_tokens_and_bounds_within_characters_are_units() -> None:
    first, second = "é".encode()
    units = list(rearranger().split_texts(tokens(second, "a", SEPARATOR, "b", first)))
    assert [each for each in units if each[0]] == [
        ([second], ""),
        ([ord("a")], "a"),
        ([SEPARATOR], ""),
        ([ord("b")], "b"),
        ([first], ""),
    ]


def test_a_token_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(UserError, match="token 261 in a sample, the tokenizer has 261 entries"):
        rearranger()(np.array([1, 261]), Scripted())
    assert joined(rearranger()(np.array([260]), Scripted([False]))) == [260]
