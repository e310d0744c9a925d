"""Fill-in-the-middle of one sample: its documents chosen, cut and put together anew, part by part.

`fim` hands in the tokens of a sample and joins the parts; `fim_origins` tells what each is made of.
The method is that of Bavarian et al. 2022 (arXiv 2207.14255) as StarCoder's training has it, except
that all chance depends on the seed and the number of the sample alone.
"""

from collections.abc import Iterator
from itertools import groupby, pairwise
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt

from tokamake.data.samples.fim.tokens import Fim, FimTokens
from tokamake.data.tokenizers import Tokenizer
from tokamake.errors import UserError

Tokens = npt.NDArray[np.int64]
Unit = str | int
"""What cuts fall between: a character, or a token that is kept as it is."""

_WINDOW = 8
"""Tokens that surely hold a whole character: at most four bytes, of one byte or more each."""


class Fragment(NamedTuple):
    """Tokens that stand together in a rearranged sample, and what they were made of.

    A special token of the rearrangement is made of nothing. Other tokens are those that stood from
    `start` on, or were made of the units of a fragment that began there.
    """

    tokens: Tokens
    start: int | None = None
    """Place in the plain sample; None: made of nothing."""
    fragment: Tokens | None = None
    """Plain tokens that were cut; None: these stay as they were."""
    unit: int = 0
    """First unit of the fragment that is in the part."""
    text: str = ""
    """The units, if they are characters, which were encoded; others are the tokens themselves."""


class Chance:
    """Chance of one sample: words of Philox (Salmon et al. 2011), a function of key and counter.

    Taken raw, for numpy keeps those for good, yet not what its generators make of them.
    """

    def __init__(self, seed: int, sample: int) -> None:
        self._words = np.random.Philox(key=np.array([seed, sample], np.uint64))

    def happens(self, rate: float) -> bool:
        """True at this rate: never at 0, always at 1."""
        return (self._words.random_raw() >> 11) * 2.0**-53 < rate

    def below(self, bound: int) -> int:
        """A number from 0 to bound - 1, each as likely but for bound / 2**64."""
        return self._words.random_raw() * bound >> 64


class Rearranger:
    """The tokens of a sample to the parts of its rearranged documents, neither cut nor filled up.

    Args:
        fim: how to rearrange.
        tokenizer: the loaded tokenizer that the tokens are of.
        marks: its special tokens.
    """

    def __init__(self, fim: Fim, tokenizer: Tokenizer, marks: FimTokens) -> None:
        self._fim, self._tokenizer, self._split = fim, tokenizer, marks.split
        self._prefix, self._suffix, self._middle = (
            Fragment(np.array([mark])) for mark in (marks.prefix, marks.suffix, marks.middle)
        )
        self._special = np.zeros(tokenizer.vocab_size, bool)
        self._special[marks.special] = True
        self.decode = tokenizer.decode

    def __call__(self, tokens: Tokens, chance: Chance) -> list[Fragment]:
        """Rearrange a sample.

        Raises:
            UserError: a token is none of the tokenizer's.
        """
        if len(tokens) and tokens.max() >= self._tokenizer.vocab_size:
            raise UserError(
                f"token {tokens.max()} in a sample, the tokenizer has {self._tokenizer.vocab_size} "
                "entries; give the tokenizer that the pairs were made with"
            )
        parts = []
        for start, document, end in _parted(tokens, tokens == self._tokenizer.eod):
            parts += self._document(document, start, chance)
            parts.append(Fragment(end, start + len(document)))
        return parts

    def _document(self, tokens: Tokens, start: int, chance: Chance) -> list[Fragment]:
        if not len(tokens) or not chance.happens(self._fim.rate):
            return [Fragment(tokens, start)]
        splits = tokens == self._split
        if not splits.any():
            return self._filled_in(tokens, start, chance)
        parts = []
        for offset, fragment, end in _parted(tokens, splits):
            at = start + offset
            chosen = len(fragment) and chance.happens(self._fim.fragment_rate)
            parts += self._filled_in(fragment, at, chance) if chosen else [Fragment(fragment, at)]
            parts.append(Fragment(end, at + len(fragment)))
        return parts

    def _filled_in(self, tokens: Tokens, start: int, chance: Chance) -> list[Fragment]:
        """Cut the text in two places, any of which may be its end, and put the middle last."""
        units: list[Unit] = []
        for ids, text in self.stretches(tokens):
            units += text or ids
        first, second = sorted(chance.below(len(units) + 1) for _ in range(2))
        prefix, middle, suffix = (
            [
                Fragment(ids, start, tokens, unit, text)
                for unit, text, ids in self._encoded(units, begin, end)
            ]
            for begin, end in pairwise((0, first, second, len(units)))
        )
        if chance.happens(self._fim.spm_rate):
            return [self._prefix, self._suffix, *suffix, self._middle, *prefix, *middle]
        return [self._prefix, *prefix, self._suffix, *suffix, self._middle, *middle]

    def stretches(self, tokens: Tokens) -> Iterator[tuple[list[int], str]]:
        """Part tokens into stretches of text, with the text, and others, with "".

        Units of a text are its characters. The others are units themselves: special tokens, and
        bits of characters, which a sample's bounds may have cut.
        """
        for _, run, special in _parted(tokens, self._special[tokens]):
            ids = run.tolist()
            first, last = self._whole_characters(ids)
            yield ids[:first], ""
            if first < last:
                yield ids[first:last], self._tokenizer.decode(ids[first:last])
            yield ids[last:] + special.tolist(), ""

    def _whole_characters(self, ids: list[int]) -> tuple[int, int]:
        """Bounds of the tokens that begin and end where a character does."""
        decode, first, last = self._tokenizer.decode, 0, len(ids)
        while first < last and decode(ids[first : first + _WINDOW]).startswith("\ufffd"):
            first += 1
        while first < last and decode(ids[max(first, last - _WINDOW) : last]).endswith("\ufffd"):
            last -= 1
        return first, last

    def _encoded(
        self, units: list[Unit], begin: int, end: int
    ) -> Iterator[tuple[int, str, Tokens]]:
        """Tokens of some units: runs of characters, with their text, and of tokens, by turns."""
        for kind, run in groupby(units[begin:end], type):
            held = list(run)
            text = "".join(cast("list[str]", held)) if kind is str else ""
            ids = self._tokenizer.encode_batch([text])[0] if kind is str else held
            yield begin, text, np.array(ids, np.int64)
            begin += len(held)


def _parted(tokens: Tokens, ends: npt.NDArray[np.bool_]) -> Iterator[tuple[int, Tokens, Tokens]]:
    """Runs of tokens that `ends` ends, each with its place and its end; the last one has none."""
    start = 0
    for end in ends.nonzero()[0].tolist():
        yield start, tokens[start:end], tokens[end : end + 1]
        start = end + 1
    yield start, tokens[start:], tokens[:0]
