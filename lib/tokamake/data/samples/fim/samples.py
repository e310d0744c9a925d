"""Fill-in-the-middle: samples with rearranged documents, so that a model learns to fill gaps.

`DocumentSamples` gives rows of tokens, and `fim.transform` rearranges them. Rows keep their length.
`trace-sample` also gets the origins of their tokens.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tokamake import files
from tokamake.config.train_sections import FimSettings
from tokamake.data.indexed.manifest import check_tokenizer
from tokamake.data.samples.document_samples import DocumentSamples
from tokamake.data.samples.fim.origins import NOWHERE, origins
from tokamake.data.samples.fim.tokens import find_tokens
from tokamake.data.samples.fim.transform import FimSegment, Rearranger, SampleRandom, Tokens
from tokamake.data.samples.loader import PAD, DocumentSpan, SplitSamples, open_samples
from tokamake.data.tokenizers import open_tokenizer
from tokamake.errors import UserError

if TYPE_CHECKING:
    from tokamake.config.resolved_run import Run


class TracedSample(NamedTuple):
    """A sample of S + 1 tokens, and their origins."""

    tokens: Tokens
    """(S + 1,) as the model sees them."""
    origins: Tokens
    """(S + 1,) position of each token in the sample before rearrangement, see `fim.origins`;
    `NOWHERE` for special tokens that mark the parts, and for `PAD`."""
    marks: dict[int, str]
    """Texts of these special tokens, by token."""
    left_out: int
    """Tokens at the end of the rearranged sample that do not fit."""


class FimSamples:
    """Samples with rearranged documents, for `batches` and `steps`.

    `verify` checks in the manifests that this tokenizer encoded the datasets.
    """

    def __init__(
        self,
        samples: DocumentSamples,
        fim: FimSettings,
        *,
        tokenizer: Path,
        seed: int,
        verify: bool = True,
    ) -> None:
        opened = open_tokenizer(tokenizer)
        for prefix in samples.prefixes if verify else []:
            check_tokenizer(prefix, opened)
        marks = find_tokens(fim, opened, path=tokenizer)
        opened.read_special_tokens_as_text()  # text between special tokens has none of them
        self._samples, self._seed = samples, seed
        self._rearrange = Rearranger(fim, opened, marks=marks)
        self._marks = {marks.prefix: fim.prefix, marks.suffix: fim.suffix, marks.middle: fim.middle}
        self.sequence_length, self.corpora = samples.sequence_length, samples.corpora
        self.digest = files.digest(
            {
                "samples": samples.digest,
                "fim": fim.model_dump(),
                "seed": seed,
                "tokenizer": opened.fingerprint,
            }
        )

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, sample: int) -> Tokens:
        """Tokens of a sample, (sequence_length + 1,), truncated or padded with `PAD`."""
        return self._row([part.tokens for part in self._parts(sample)])

    def trace(self, sample: int) -> TracedSample:
        parts = self._parts(sample)
        tokens = [part.tokens for part in parts]
        row = self._row(tokens)
        row_origins = self._row([origins(parts, self._rearrange)], fill=NOWHERE)
        num_left_out = max(sum(map(len, tokens)) - len(row), 0)
        return TracedSample(row, row_origins, self._marks, num_left_out)

    def _parts(self, sample: int) -> list[FimSegment]:
        plain = self._samples[sample]
        return self._rearrange(plain[plain != PAD], SampleRandom(self._seed, sample))

    def _row(self, values: Sequence[Tokens], fill: int = PAD) -> Tokens:
        row = np.full(self.sequence_length + 1, fill)
        joined = np.concatenate(values)
        row[: len(joined)] = joined[: len(row)]
        return row

    def corpus_of(self, sample: int) -> str:
        return self._samples.corpus_of(sample)

    def corpus_numbers(self, samples: Tokens) -> Tokens:
        return self._samples.corpus_numbers(samples)

    def spans(self, sample: int) -> list[DocumentSpan]:
        """Spans of a sample before rearrangement."""
        return self._samples.spans(sample)

    def samples_of(self, prefix: str, sequence: int) -> Tokens:
        """Samples, ascending, that hold a token of a sequence before rearrangement."""
        return self._samples.samples_of(prefix, sequence)


def training_samples(run: "Run", *, verify: bool = True) -> SplitSamples | FimSamples:
    """Training samples of a run, of its objective, rearranged if its settings say so."""
    samples = open_samples(run.index, split="train", data_root=run.data_root, verify=verify)
    fim = run.train.fim
    if not fim.rate:
        return samples
    assert isinstance(samples, DocumentSamples), "the settings refuse other objectives"
    if run.tokenizer is None:
        raise UserError("train.fim.rate: needs a tokenizer; run `tokamake resolve` again")
    return FimSamples(samples, fim, tokenizer=run.tokenizer, seed=run.seed, verify=verify)
