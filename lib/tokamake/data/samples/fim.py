"""Fill-in-the-middle: documents of a sample rearranged so that a model learns to fill gaps.

Rows of tokens come from `loader`, text from the tokenizer; rows of the same length go to batches.
The method is that of Bavarian et al. 2022 (arXiv 2207.14255) as StarCoder's training has it, except
that all chance depends on the seed and the number of the sample alone.
"""

from collections.abc import Iterator
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt

from tokamake import files
from tokamake.data.pairs.made_with import check_tokenizer
from tokamake.data.samples.fim_tokens import Fim, FimTokens, find_tokens
from tokamake.data.samples.loader import PAD, Piece, Samples
from tokamake.data.tokenizers import Tokenizer, open_tokenizer
from tokamake.errors import UserError

Tokens = npt.NDArray[np.int64]
Unit = str | int
"""What cuts fall between: a character, or a token that is kept as it is."""

_WINDOW = 8
"""Tokens that surely hold a whole character: at most four bytes, of one byte or more each."""


class FimSamples:
    """Samples with their documents rearranged; `batches` and `steps` take them as they are.

    Attributes:
        sequence_length: tokens that the model sees per sample.
        digest: hash over all that determines the samples and their order.

    Args:
        samples: the samples as they are.
        fim: how to rearrange them.
        tokenizer: file or folder of the tokenizer that the pairs were made with.
        seed: 0 to 2**64 - 1.
        verify: read the pairs' manifests to see whether they were made with this tokenizer.

    Raises:
        UserError: the tokenizer has not the special tokens, or loses text, or is not that of the
            pairs.
    """

    def __init__(
        self, samples: Samples, fim: Fim, *, tokenizer: Path, seed: int, verify: bool = True
    ) -> None:
        opened = open_tokenizer(tokenizer)
        for prefix in samples.pairs if verify else []:
            check_tokenizer(prefix, opened)
        marks = find_tokens(fim, opened, tokenizer)
        self._samples, self._seed = samples, seed
        self._rearranged = _Rearranger(fim, opened, marks)
        self.sequence_length = samples.sequence_length
        self.digest = files.digest(
            {
                "samples": samples.digest,
                "fim": asdict(fim),
                "seed": seed,
                "tokenizer": opened.fingerprint,
            }
        )

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, sample: int) -> Tokens:
        """Tokens of one sample, (sequence_length + 1,).

        One that has become longer is cut, one that has become shorter filled up with `PAD`.
        """
        plain = self._samples[sample]
        made = self._rearranged(plain[plain != PAD], Chance(self._seed, sample))
        row = np.full_like(plain, PAD)
        row[: len(made)] = made[: len(row)]
        return row

    def source(self, sample: int) -> str:
        """Name of the corpus that a sample comes from."""
        return self._samples.source(sample)

    def pieces(self, sample: int) -> list[Piece]:
        """What a sample was made of, before its documents were rearranged."""
        return self._samples.pieces(sample)

    def seen(self, prefix: str, sequence: int) -> Tokens:
        """Samples, ascending, that were made of a token of a sequence of a pair."""
        return self._samples.seen(prefix, sequence)


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


class _Rearranger:
    """The tokens of a sample to those of its rearranged documents, neither cut nor filled up."""

    def __init__(self, fim: Fim, tokenizer: Tokenizer, marks: FimTokens) -> None:
        self._fim, self._tokenizer, self._marks = fim, tokenizer, marks
        self._special = np.zeros(tokenizer.vocab_size, bool)
        self._special[marks.special] = True

    def __call__(self, tokens: Tokens, chance: Chance) -> Tokens:
        if len(tokens) and tokens.max() >= self._tokenizer.vocab_size:
            raise UserError(
                f"token {tokens.max()} in a sample, the tokenizer has {self._tokenizer.vocab_size} "
                "entries; give the tokenizer that the pairs were made with"
            )
        made = []
        for document, end in _parted(tokens, tokens == self._tokenizer.eod):
            made += [self._document(document, chance), end]
        return np.concatenate(made)

    def _document(self, tokens: Tokens, chance: Chance) -> Tokens:
        if not len(tokens) or not chance.happens(self._fim.rate):
            return tokens
        splits = tokens == self._marks.split
        if not splits.any():
            return self._filled_in(tokens, chance)
        made = []
        for fragment, end in _parted(tokens, splits):
            chosen = len(fragment) and chance.happens(self._fim.fragment_rate)
            made += [self._filled_in(fragment, chance) if chosen else fragment, end]
        return np.concatenate(made)

    def _filled_in(self, tokens: Tokens, chance: Chance) -> Tokens:
        """Cut the text in two places, any of which may be its end, and put the middle last."""
        units = self._units(tokens)
        first, second = sorted(chance.below(len(units) + 1) for _ in range(2))
        parts = units[:first], units[first:second], units[second:]
        prefix, middle, suffix = (self._tokens(part) for part in parts)
        mark = self._marks
        if chance.happens(self._fim.spm_rate):
            made = [mark.prefix, mark.suffix, *suffix, mark.middle, *prefix, *middle]
        else:
            made = [mark.prefix, *prefix, mark.suffix, *suffix, mark.middle, *middle]
        return np.array(made, np.int64)

    def _units(self, tokens: Tokens) -> list[Unit]:
        """Characters of the text; special tokens, and bits of characters, stay tokens.

        The sample's bounds may cut a character, some bytes of which would be no text.
        """
        units: list[Unit] = []
        for run, special in _parted(tokens, self._special[tokens]):
            ids = run.tolist()
            first, last = self._whole_characters(ids)
            text = self._tokenizer.decode(ids[first:last]) if first < last else ""
            units += [*ids[:first], *text, *ids[last:], *special.tolist()]
        return units

    def _whole_characters(self, ids: list[int]) -> tuple[int, int]:
        """Bounds of the tokens that begin and end where a character does."""
        decode, first, last = self._tokenizer.decode, 0, len(ids)
        while first < last and decode(ids[first : first + _WINDOW]).startswith("\ufffd"):
            first += 1
        while first < last and decode(ids[max(first, last - _WINDOW) : last]).endswith("\ufffd"):
            last -= 1
        return first, last

    def _tokens(self, units: list[Unit]) -> list[int]:
        tokens: list[int] = []
        for kind, run in groupby(units, type):
            if kind is str:
                tokens += self._tokenizer.encode_batch(["".join(cast("Iterator[str]", run))])[0]
            else:
                tokens += cast("Iterator[int]", run)
        return tokens


def _parted(tokens: Tokens, ends: npt.NDArray[np.bool_]) -> Iterator[tuple[Tokens, Tokens]]:
    """Runs of tokens that `ends` ends, each with its end; the last one has none."""
    start = 0
    for end in ends.nonzero()[0].tolist():
        yield tokens[start:end], tokens[end : end + 1]
        start = end + 1
    yield tokens[start:], tokens[:0]
