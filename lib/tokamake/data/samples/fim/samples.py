"""Fill-in-the-middle: samples with documents rearranged so that a model learns to fill gaps.

Rows of tokens come from `loader`, their rearranged parts from `fim_documents`; rows of the same
length go to batches, and with the places that they come from to `trace-sample`.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tokamake import files
from tokamake.data.indexed.tokenizer_check import check_tokenizer
from tokamake.data.samples.fim.documents import Chance, Fragment, Rearranger, Tokens
from tokamake.data.samples.fim.origins import NOWHERE, origins
from tokamake.data.samples.fim.tokens import Fim, find_tokens
from tokamake.data.samples.loader import PAD, DocumentSpan, Samples
from tokamake.data.tokenizers import open_tokenizer
from tokamake.errors import UserError

if TYPE_CHECKING:
    from tokamake.config.resolved_run import Run


class Traced(NamedTuple):
    """A sample of S + 1 tokens, and where they come from."""

    tokens: Tokens
    """(S + 1,) as the model sees them."""
    origins: Tokens
    """(S + 1,) place of each in the sample before its documents were rearranged, as `fim_origins`
    finds it; `NOWHERE` for special tokens that mark the parts, and for `PAD`."""
    marks: dict[int, str]
    """Texts of those special tokens, by their numbers."""
    left_out: int
    """Tokens at the end of the rearranged sample that have no room in it."""


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
        self._rearranged = Rearranger(fim, opened, marks)
        self._marks = {
            marks.prefix: fim.prefix,
            marks.suffix: fim.suffix,
            marks.middle: fim.middle,
        }
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
        return self._row([part.tokens for part in self._parts(sample)])

    def traced(self, sample: int) -> Traced:
        """The same tokens of one sample, with the places that they come from."""
        parts = self._parts(sample)
        tokens = [part.tokens for part in parts]
        row = self._row(tokens)
        found = self._row([origins(parts, self._rearranged)], fill=NOWHERE)
        return Traced(row, found, self._marks, max(sum(map(len, tokens)) - len(row), 0))

    def _parts(self, sample: int) -> list[Fragment]:
        plain = self._samples[sample]
        return self._rearranged(plain[plain != PAD], Chance(self._seed, sample))

    def _row(self, values: Sequence[Tokens], fill: int = PAD) -> Tokens:
        row = np.full(self.sequence_length + 1, fill)
        made = np.concatenate(values)
        row[: len(made)] = made[: len(row)]
        return row

    def source(self, sample: int) -> str:
        """Name of the corpus that a sample comes from."""
        return self._samples.source(sample)

    def pieces(self, sample: int) -> list[DocumentSpan]:
        """What a sample was made of, before its documents were rearranged."""
        return self._samples.pieces(sample)

    def seen(self, prefix: str, sequence: int) -> Tokens:
        """Samples, ascending, that were made of a token of a sequence of a pair."""
        return self._samples.seen(prefix, sequence)


def training_samples(run: "Run", *, verify: bool = True) -> Samples | FimSamples:
    """Samples of a run, rearranged if it says so.

    Raises:
        UserError: the index, a pair or the tokenizer is missing, or they do not fit together.
    """
    samples = Samples(run.index, split="train", data_root=run.data_root, verify=verify)
    fim = Fim(**run.train.fim.model_dump())
    if not fim.rate:
        return samples
    if run.tokenizer is None:
        raise UserError("train.fim.rate: needs a tokenizer; run `tokamake resolve` again")
    return FimSamples(samples, fim, tokenizer=run.tokenizer, seed=run.seed, verify=verify)
