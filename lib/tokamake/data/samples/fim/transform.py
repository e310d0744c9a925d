"""Fill-in-the-middle of one sample: choose its documents, cut them and rearrange the parts.

The method is by Bavarian et al. 2022 (arXiv 2207.14255), as in StarCoder's training. Unlike
there, all random numbers depend only on the seed and the number of the sample.
"""

from collections.abc import Iterator
from itertools import groupby, pairwise
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt

from tokamake.config.train_sections import FimSettings
from tokamake.data.samples.fim.tokens import FimTokens
from tokamake.data.tokenizers import Tokenizer
from tokamake.errors import UserError

Tokens = npt.NDArray[np.int64]
Unit = str | int
"""Cuts fall between units: a character, or a token that is kept."""

_WINDOW = 8
"""Enough tokens for a whole character: it has at most four bytes, and a token has at least one."""


class FimSegment(NamedTuple):
    """Consecutive tokens of a rearranged sample, and their origin.

    There are three kinds. A special token of the rearrangement has no origin. Kept tokens were
    consecutive in the plain sample from `start`. Encoded tokens come from units of `original`.
    """

    tokens: Tokens
    start: int | None = None
    """Position in the plain sample, of the tokens or of `original`; None: no origin."""
    original: Tokens | None = None
    """Plain tokens of the fragment that was cut; None: the tokens are kept."""
    unit: int = 0
    """First unit of `original` in this part."""
    text: str = ""
    """Encoded characters; empty if the units are tokens."""


class SampleRandom:
    """Random numbers of one sample: words of Philox (Salmon et al. 2011) with the seed as key.

    NumPy guarantees the raw words for all versions, but not the output of its generators.
    """

    def __init__(self, seed: int, sample: int) -> None:
        self._words = np.random.Philox(key=np.array([seed, sample], np.uint64))

    def happens(self, rate: float) -> bool:
        """True with probability `rate`: never at 0, always at 1."""
        # 53 bits make a float64 in [0, 1), as in NumPy's Generator.random.
        return (self._words.random_raw() >> 11) * 2.0**-53 < rate

    def below(self, bound: int) -> int:
        """Uniform number from 0 to bound - 1, with a bias of at most bound / 2**64."""
        # Always one word: rejection sampling would take a varying number of words.
        return self._words.random_raw() * bound >> 64


class Rearranger:
    """Rearranges the documents of a sample. Does not truncate or pad."""

    def __init__(self, fim: FimSettings, tokenizer: Tokenizer, *, marks: FimTokens) -> None:
        self._fim, self._tokenizer, self._split = fim, tokenizer, marks.split
        self._prefix, self._suffix, self._middle = (
            FimSegment(np.array([mark])) for mark in (marks.prefix, marks.suffix, marks.middle)
        )
        self._special = np.zeros(tokenizer.vocab_size, bool)
        self._special[marks.special] = True
        self.decode = tokenizer.decode

    def __call__(self, tokens: Tokens, random: SampleRandom) -> list[FimSegment]:
        if len(tokens) and tokens.max() >= self._tokenizer.vocab_size:
            raise UserError(
                f"token {tokens.max()} in a sample, the tokenizer has {self._tokenizer.vocab_size} "
                "entries; give the tokenizer that encoded the datasets"
            )
        parts = []
        for start, document, end in _split_at(tokens, tokens == self._tokenizer.eod):
            parts += self._document(document, start, random=random)
            parts.append(FimSegment(end, start + len(document)))
        return parts

    def _document(self, tokens: Tokens, start: int, *, random: SampleRandom) -> list[FimSegment]:
        # The order of random draws decides the samples: draw only where the method needs a number.
        if not len(tokens) or not random.happens(self._fim.rate):
            return [FimSegment(tokens, start)]
        splits = tokens == self._split
        if not splits.any():
            return self._fill_in_middle(tokens, start, random=random)
        parts = []
        for offset, fragment, end in _split_at(tokens, splits):
            position = start + offset
            if len(fragment) and random.happens(self._fim.fragment_rate):
                parts += self._fill_in_middle(fragment, position, random=random)
            else:
                parts.append(FimSegment(fragment, position))
            parts.append(FimSegment(end, position + len(fragment)))
        return parts

    def _fill_in_middle(
        self, tokens: Tokens, start: int, *, random: SampleRandom
    ) -> list[FimSegment]:
        """Cut a text at two random places, its ends included, and move the middle to the end."""
        units: list[Unit] = []
        for ids, text in self.split_texts(tokens):
            units += text or ids
        first, second = sorted(random.below(len(units) + 1) for _ in range(2))
        prefix, middle, suffix = (
            [
                FimSegment(ids, start, tokens, unit, text)
                for unit, text, ids in self._encode(units, begin, end)
            ]
            for begin, end in pairwise((0, first, second, len(units)))
        )
        if random.happens(self._fim.spm_rate):
            return [self._prefix, self._suffix, *suffix, self._middle, *prefix, *middle]
        return [self._prefix, *prefix, self._suffix, *suffix, self._middle, *middle]

    def split_texts(self, tokens: Tokens) -> Iterator[tuple[list[int], str]]:
        """Split tokens into runs of text, with the text, and special tokens, with "".

        Units of a text are its characters. Other tokens are units themselves: special tokens, and
        incomplete characters at the bounds of the sample.
        """
        for _, plain, special in _split_at(tokens, self._special[tokens]):
            ids = plain.tolist()
            first, last = self._whole_characters(ids)
            yield ids[:first], ""
            if first < last:
                yield ids[first:last], self._tokenizer.decode(ids[first:last])
            yield ids[last:] + special.tolist(), ""

    def _whole_characters(self, ids: list[int]) -> tuple[int, int]:
        """Bounds of the tokens that begin and end with a whole character."""
        # An incomplete character decodes to U+FFFD.
        decode, first, last = self._tokenizer.decode, 0, len(ids)
        while first < last and decode(ids[first : first + _WINDOW]).startswith("\ufffd"):
            first += 1
        while first < last and decode(ids[max(first, last - _WINDOW) : last]).endswith("\ufffd"):
            last -= 1
        return first, last

    def _encode(self, units: list[Unit], begin: int, end: int) -> Iterator[tuple[int, str, Tokens]]:
        for kind, group in groupby(units[begin:end], type):
            members = list(group)
            text = "".join(cast("list[str]", members)) if kind is str else ""
            ids = self._tokenizer.encode_batch([text])[0] if kind is str else members
            yield begin, text, np.array(ids, np.int64)
            begin += len(members)


def _split_at(tokens: Tokens, ends: npt.NDArray[np.bool_]) -> Iterator[tuple[int, Tokens, Tokens]]:
    """Split tokens after each end: position, tokens before the end, end; the last has no end."""
    start = 0
    for end in ends.nonzero()[0].tolist():
        yield start, tokens[start:end], tokens[end : end + 1]
        start = end + 1
    yield start, tokens[start:], tokens[:0]
