"""The positive passage of a question is found among the passages of the global batch.

Negatives are the hard negatives of the question and all passages of the other questions (arXiv
2004.04906). Other positives of the question are no negatives, wherever they come from.
"""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from tokamake.config.finetune import FinetuneTask, TaskRun
from tokamake.config.resolved_run import Run
from tokamake.models.common.language_model import Predictions
from tokamake.parallel.collectives import all_gather, gather
from tokamake.parallel.loss import NO_LABEL
from tokamake.parallel.mesh import SINGLE_RANK, Mesh
from tokamake.train.batch import HostBatch
from tokamake.train.objectives._in_batch import Compared, InBatchObjective, embeddings
from tokamake.train.objectives._tasks import TaskObjective
from tokamake.train.objectives.retrieval.rows import (
    NO_PASSAGE,
    QuestionBatch,
    QuestionRows,
    read_rows,
)
from tokamake.train.objectives.retrieval.scoring import (
    is_any_of,
    places_of_positives,
    scores_of_places,
)

_CPU = torch.device("cpu")
_LABELED_SHARE = 0.8
"""Share of random micro batches whose questions all have a passage."""


class Objective(InBatchObjective, TaskObjective):
    """Rows are a `QuestionBatch`."""

    def __init__(self, run: Run, mesh: Mesh = SINGLE_RANK, *, device: torch.device = _CPU) -> None:
        super().__init__(run, mesh, device=device)
        assert isinstance(run, TaskRun)
        hidden_size = run.architecture.hidden_size
        self._scale = 1 / math.sqrt(hidden_size) if run.task.own["score_scaling"] else 1.0

    # ---- Rows of files, and their scores ----

    @classmethod
    def read_rows(
        cls, files: Iterable[str], task: FinetuneTask, *, tokenizer: Path, sequence_length: int
    ) -> QuestionRows:
        return read_rows(files, task, tokenizer=tokenizer, sequence_length=sequence_length)

    @staticmethod
    def sample_outputs(predicted: Predictions) -> Tensor:
        """(B, 1 + C, D) vectors of each question, then of its passages."""
        queries_BD, passages = embeddings(predicted)
        passages_BCD = passages.view(len(queries_BD), -1, queries_BD.shape[1])
        return torch.cat((queries_BD[:, None], passages_BCD), dim=1)

    @staticmethod
    def row_scores(
        outputs: npt.NDArray[np.float32],
        rows: QuestionRows,
        *,
        task: FinetuneTask,  # noqa: ARG004
    ) -> dict[str, float]:
        return scores_of_places(_places(outputs, rows))

    @staticmethod
    def row_predictions(
        outputs: npt.NDArray[np.float32],
        rows: QuestionRows,
        *,
        task: FinetuneTask,  # noqa: ARG004
    ) -> list[dict[str, Any]]:
        """The place of each question's positive passage."""
        places = _places(outputs, rows).tolist()
        return [{"row": row, "place": place} for row, place in enumerate(places)]

    # ---- From rows to losses ----

    def random_rows(self, generator: np.random.Generator) -> QuestionBatch:
        """Random questions; some share a passage, and the last one may only fill up the batch."""
        assert isinstance(self.run, TaskRun)
        size, length = self.run.train.micro_batch_size, self.run.train.sequence_length
        num_passages = 1 + self.run.task.own["hard_negatives"]
        labels = generator.integers(1, 10 * size, size=(size, num_passages + 1))
        labels[:, num_passages] = labels[:, 0]  # the positives of a question
        if size > 1 and generator.random() < 1 - _LABELED_SHARE:  # a step has a question
            labels[-1] = NO_PASSAGE
        texts = [
            generator.integers(self._vocab_size, size=(number, length))
            for number in (size, size * num_passages)
        ]
        padding = [
            np.arange(length) >= generator.integers(1, length + 1, size=(len(each), 1))
            for each in texts
        ]
        num_labels = int((labels[:, 0] != NO_PASSAGE).sum())
        return QuestionBatch(texts[0], padding[0], texts[1], padding[1], labels, num_labels)

    def collate(self, rows: QuestionBatch) -> HostBatch:
        """Hide padding; no token has a label."""
        no_labels = np.full((len(rows.tokens), 1), NO_LABEL)
        return HostBatch(rows.tokens, no_labels, rows.arrays(), rows.labels, rows.num_labels)

    def num_samples(self, sample_labels: Tensor | None, *, num_rows: int) -> Tensor:  # noqa: ARG002
        assert sample_labels is not None
        return (sample_labels[:, 0] != NO_PASSAGE).sum(dtype=torch.float32)

    def compared(
        self, queries_ND: Tensor, texts_MD: Tensor, sample_labels: Tensor | None
    ) -> Compared:
        """Positives of a question, and rows that fill up a micro batch, are no negatives."""
        assert sample_labels is not None
        axis, number = self.mesh.data, len(queries_ND)
        num_passages = len(texts_MD) // number
        own_numbers = sample_labels[:, :num_passages]
        numbers = all_gather(own_numbers.flatten(), axis, dim=0) if axis.size > 1 else None
        numbers_M = own_numbers.flatten() if numbers is None else numbers
        own = axis.rank * number + torch.arange(number, device=self.device)
        own = own[:, None] * num_passages
        hidden = is_any_of(numbers_M, sample_labels[:, num_passages:]) | (numbers_M == NO_PASSAGE)
        hidden.scatter_(1, own, value=False)
        scores = queries_ND @ gather(texts_MD, axis, dim=0).T * self._scale
        scores = scores.masked_fill(hidden, -math.inf)
        losses = F.cross_entropy(scores, own[:, 0], reduction="none")
        of_own = scores.detach().gather(1, own)
        ranks = (scores.detach() >= of_own).sum(1) - 1
        return Compared(losses.where(own_numbers[:, 0] != NO_PASSAGE, 0.0), ranks)


def _places(outputs: npt.NDArray[np.float32], rows: QuestionRows) -> npt.NDArray[np.int64]:
    vectors = outputs.reshape(len(rows), rows.num_passages + 1, -1)
    return places_of_positives(vectors, rows.labels)
