"""Pairs of texts: the own text of each query is found among the texts of the global batch.

The loss is the mean cross entropy of each query's own text among the texts of all samples of the
step, on all ranks and in all micro batches. So micro batches and ranks do not change it: if there
are several micro batches, each passes the model twice, first without gradients (GradCache, arXiv
2101.06983).
Shape suffixes: B samples of a micro batch, N of all micro batches of a rank, M their texts, L
tokens, D width. A sample has M / N texts; its own one comes first.
"""

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tokamake.config.resolved_run import Run
from tokamake.models.common.language_model import Predictions
from tokamake.parallel.mesh import SINGLE_RANK, Mesh
from tokamake.train.batch import MicroBatch
from tokamake.train.objectives._base import Labels, Losses, ObjectiveBase

_CPU = torch.device("cpu")


class Compared(NamedTuple):
    """Queries, compared with all texts of the step."""

    losses: Tensor
    """(N,) fp32 cross entropy of each query's own text; 0 of rows that fill up a micro batch."""
    ranks: Tensor
    """(N,) int64 number of other texts that score at least as high."""


class _Ahead(NamedTuple):
    """A micro batch, compared with all texts of the step."""

    compared: Compared
    of_queries_BD: Tensor
    """fp32 gradients of the sum of the losses of all ranks."""
    of_texts_MD: Tensor


class InBatchObjective(ObjectiveBase):
    """An objective whose samples are compared with each other."""

    has_sample_labels = True
    compares_samples = True

    def __init__(self, run: Run, mesh: Mesh = SINGLE_RANK, *, device: torch.device = _CPU) -> None:
        super().__init__(run, mesh, device=device)
        self._ahead: deque[_Ahead] = deque()
        self._ranks_B = torch.zeros(0, dtype=torch.int64, device=device)

    @abstractmethod
    def compared(
        self, queries_ND: Tensor, texts_MD: Tensor, sample_labels: Tensor | None
    ) -> Compared:
        """Compare the queries of this rank with the texts of all ranks; all ranks call it.

        Args:
            sample_labels: of these samples, as `collate` made them.
        """

    def num_samples(self, sample_labels: Tensor | None, *, num_rows: int) -> Tensor:  # noqa: ARG002
        """Samples of a micro batch, an fp32 scalar; rows that fill it up do not count."""
        return torch.full((), float(num_rows), device=self.device)

    # ---- From a micro batch to losses ----

    def look_ahead(
        self, forward: Callable[[MicroBatch], Predictions], batches: Sequence[MicroBatch]
    ) -> None:
        """Compare the samples of all micro batches, and keep the gradients of their vectors."""
        self._ahead.clear()
        if len(batches) == 1:
            return
        with torch.no_grad():
            vectors = [embeddings(forward(batch)) for batch in batches]
        queries_ND, texts_MD = (
            torch.cat(each).requires_grad_() for each in zip(*vectors, strict=True)
        )
        labels = [each.sample_labels for each in batches if each.sample_labels is not None]
        with torch.enable_grad():
            whole = self.compared(queries_ND, texts_MD, torch.cat(labels) if labels else None)
            gradients = torch.autograd.grad(whole.losses.sum(), (queries_ND, texts_MD))
        sizes = [[len(each) for each in pair] for pair in vectors]
        num_queries, num_texts = ([*each] for each in zip(*sizes, strict=True))
        compared = (whole.losses.detach().split(num_queries), whole.ranks.split(num_queries))
        of_batches = zip(
            map(Compared, *compared),
            gradients[0].split(num_queries),
            gradients[1].split(num_texts),
            strict=True,
        )
        self._ahead.extend(_Ahead(*each) for each in of_batches)

    def losses(
        self,
        predicted: Predictions,
        labels: Labels,
        *,
        row_losses: list[Tensor] | None = None,  # noqa: ARG002
    ) -> Losses:
        """Loss of this rank's queries; its gradients are of the loss of all ranks."""
        queries_BD, texts_MD = embeddings(predicted)
        if self._ahead:
            known = self._ahead.popleft()
            self._ranks_B = known.compared.ranks
            # Its value is 0; it gives the vectors their gradients.
            pull = (queries_BD * known.of_queries_BD).sum() + (texts_MD * known.of_texts_MD).sum()
            loss = known.compared.losses.sum() + pull - pull.detach()
        else:
            compared = self.compared(queries_BD, texts_MD, labels.samples)
            loss, self._ranks_B = compared.losses.sum(), compared.ranks
        number = self.num_samples(labels.samples, num_rows=len(queries_BD))
        return Losses(torch.zeros((), device=self.device), loss, number)


def embeddings(predicted: Predictions) -> tuple[Tensor, Tensor]:
    """Vectors (B, D) of queries and (M, D) of texts, fp32."""
    queries, texts = predicted.query_embeddings, predicted.block_embeddings
    assert queries is not None
    assert texts is not None
    return queries.float(), texts.float()
