"""Requests of tasks to a model: log-probabilities of tokens, and continuations."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokamake.data.tokenizers import Tokenizer
from tokamake.errors import UserError
from tokamake.inference.driven_model import DrivenModel
from tokamake.inference.engine import Generation, InferenceEngine
from tokamake.runtime.console import progress


class RowScores(NamedTuple):
    """How likely a model finds some tokens of a row."""

    log_probability: float
    """Sum over these tokens."""
    is_greedy: bool
    """Whether each is the most likely token."""


class Scorer:
    """A model, within its `driven` context, and its tokenizer. Only the first rank has one.

    `sequence_length`: most tokens that the model reads at once; `batch_size`: rows of a pass;
    `end_tokens` None: the end token of the tokenizer.
    """

    def __init__(
        self,
        model: DrivenModel,
        tokenizer: Tokenizer,
        *,
        end_tokens: frozenset[int] | None = None,
        sequence_length: int,
        batch_size: int,
    ) -> None:
        self._model, self.tokenizer = model, tokenizer
        self.end_tokens = end_tokens or frozenset([tokenizer.eod])
        self.sequence_length, self.batch_size = sequence_length, batch_size

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, without special tokens."""
        return self.tokenizer.encode_batch([text])[0]

    def score(
        self, rows: Sequence[tuple[Sequence[int] | npt.NDArray[np.int64], int]], *, label: str
    ) -> list[RowScores]:
        """Score the last tokens of rows: at most `sequence_length` + 1 tokens, and how many count.

        At least one token comes before the scored ones. Rows of similar lengths share a pass; the
        result has the order of `rows`.
        """
        order = sorted(range(len(rows)), key=lambda place: -len(rows[place][0]))
        scores: dict[int, RowScores] = {}
        batches = range(0, len(order), self.batch_size)
        for first in progress(batches, label=label, total=len(batches), unit="batches"):
            places = order[first : first + self.batch_size]
            tokens = [[*map(int, rows[place][0])] for place in places]
            counts = [rows[place][1] for place in places]
            predicting = [
                range(len(row) - 1 - count, len(row) - 1)
                for row, count in zip(tokens, counts, strict=True)
            ]
            result = self._model.score(tokens, predicting)
            log_probabilities = result.log_probabilities.double()
            if not log_probabilities.isfinite().all():
                raise UserError(
                    "checkpoint: a log-probability is not finite; its weights are broken"
                )
            for place, values, greedy in zip(
                places,
                log_probabilities.split(counts),
                result.are_greedy.split(counts),
                strict=True,
            ):
                scores[place] = RowScores(float(values.sum()), bool(greedy.all()))
        return [scores[place] for place in range(len(rows))]

    def nats(self, tokens: npt.NDArray[np.int64], *, stride: int, label: str) -> float:
        """Sum of the cross-entropies of a stream of tokens (tokens,), except its first token.

        Windows of `sequence_length` tokens begin every `stride` tokens, or fewer. Each predicts the
        tokens that no earlier window has predicted, so a shorter stride gives more context. As in
        Megatron-LM.
        """
        last, end, rows = len(tokens) - 1, 0, []
        for first in range(0, max(last, 0), min(stride, self.sequence_length)):
            before, end = end, min(first + self.sequence_length, last)
            if end > before:
                rows.append((tokens[first : end + 1], end - before))
        return -sum(row.log_probability for row in self.score(rows, label=label))

    def continue_rows(self, generations: Iterable[Generation]) -> None:
        """Continue sequences together."""
        engine = InferenceEngine(
            self._model,
            num_rows=self.batch_size,
            vocab_size=self.tokenizer.vocab_size,
            capacity=self.sequence_length,
        )
        engine.run(generations)
