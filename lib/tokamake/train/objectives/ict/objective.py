"""The block of a query is found among the blocks of the global batch (arXiv 1906.00300).

The loss is the mean cross entropy of each query's own block among the blocks of all samples of the
step, on all ranks and in all micro batches. So micro batches and ranks do not change it: if there
are several micro batches, each passes the model twice, first without gradients (GradCache, arXiv
2101.06983).
Shape suffixes: B samples of a micro batch, N of all micro batches of a rank, L tokens, D width.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from tokamake.config.objective import objective_section
from tokamake.config.resolved_run import Run
from tokamake.models.common.language_model import Predictions
from tokamake.parallel.collectives import gather
from tokamake.parallel.loss import NO_LABEL
from tokamake.parallel.mesh import SINGLE_RANK, Mesh
from tokamake.train.batch import HostBatch, MicroBatch
from tokamake.train.objectives._base import Labels, Losses, ObjectiveBase
from tokamake.train.objectives.ict.samples import ict_record

_CPU = torch.device("cpu")
_MULTIPLE = 8
"""Lengths of texts in a micro batch are multiples of this."""


class _Compared(NamedTuple):
    """Samples of a micro batch, compared with all samples of the step."""

    losses_B: Tensor
    """fp32 cross entropy of each query's own block."""
    ranks_B: Tensor
    """int64 number of other blocks that score at least as high."""
    of_queries_BD: Tensor
    """fp32 gradients of the sum of the losses of all ranks."""
    of_blocks_BD: Tensor


class Objective(ObjectiveBase):
    """Rows are records of the loader, see `ict_record`."""

    has_sample_labels = True
    compares_samples = True

    def __init__(self, run: Run, mesh: Mesh = SINGLE_RANK, *, device: torch.device = _CPU) -> None:
        super().__init__(run, mesh, device=device)
        section = objective_section(run.train)
        self._topk: tuple[int, ...] = section.topk
        self.metrics = tuple(f"accuracy_at_{k}" for k in self._topk)
        hidden_size = run.architecture.hidden_size
        self._scale = 1 / math.sqrt(hidden_size) if section.score_scaling else 1.0
        self._ahead: deque[_Compared] = deque()
        self._ranks_B = torch.zeros(0, dtype=torch.int64, device=device)

    # ---- From samples to a micro batch ----

    def collate(self, rows: Any) -> HostBatch:
        """Hide padding, as few as the longest query and the longest block need; no token has a
        label."""
        queries, query_documents = self._texts(rows["query"], rows["num_query"])
        blocks, block_documents = self._texts(rows["block"], rows["num_block"])
        further = {
            "document_ids": query_documents,
            "block_tokens": blocks,
            "block_document_ids": block_documents,
        }
        no_labels = np.full((len(queries), 1), NO_LABEL)
        documents = np.ascontiguousarray(rows["document"])
        return HostBatch(queries, no_labels, further, sample_labels=documents)

    def _texts(
        self, tokens_BL: npt.NDArray[np.int64], lengths_B: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Tokens, and numbers that are 1 for padding and 0 for other tokens."""
        width = tokens_BL.shape[1]
        if not self.run.train.compile:  # which needs equal shapes
            multiple = _MULTIPLE * self.mesh.tensor.size
            width = min(width, -(-int(lengths_B.max()) // multiple) * multiple)
        is_padding = np.arange(width) >= lengths_B[:, None]
        return np.ascontiguousarray(tokens_BL[:, :width]), is_padding.astype(np.int64)

    def random_rows(self, generator: np.random.Generator) -> npt.NDArray[Any]:
        """Random tokens of full texts."""
        train = self.run.train
        rows = np.zeros(train.micro_batch_size, ict_record(train.sequence_length))
        for text in ("query", "block"):
            rows[text] = generator.integers(self._vocab_size, size=rows[text].shape)
            rows[f"num_{text}"] = train.sequence_length
        return rows

    # ---- From a micro batch to losses ----

    def look_ahead(
        self, forward: Callable[[MicroBatch], Predictions], batches: Sequence[MicroBatch]
    ) -> None:
        """Compare the samples of all micro batches, and keep the gradients of their vectors."""
        self._ahead.clear()
        if len(batches) == 1:
            return
        with torch.no_grad():
            vectors = [_vectors(forward(batch)) for batch in batches]
        queries_ND, blocks_ND = (
            torch.cat(each).requires_grad_() for each in zip(*vectors, strict=True)
        )
        with torch.enable_grad():
            losses_N, ranks_N = self._compared(queries_ND, blocks_ND)
            gradients = torch.autograd.grad(losses_N.sum(), (queries_ND, blocks_ND))
        whole = (losses_N.detach(), ranks_N, *gradients)
        sizes = [len(batch.inputs) for batch in batches]
        self._ahead.extend(map(_Compared, *(each.split(sizes) for each in whole)))

    def losses(
        self,
        predicted: Predictions,
        labels: Labels,  # noqa: ARG002
        *,
        row_losses: list[Tensor] | None = None,  # noqa: ARG002
    ) -> Losses:
        """Loss of this rank's queries; its gradients are of the loss of all ranks."""
        queries_BD, blocks_BD = _vectors(predicted)
        if self._ahead:
            known = self._ahead.popleft()
            self._ranks_B = known.ranks_B
            # Its value is 0; it gives the vectors their gradients.
            pull = (queries_BD * known.of_queries_BD + blocks_BD * known.of_blocks_BD).sum()
            loss = known.losses_B.sum() + pull - pull.detach()
        else:
            losses_B, self._ranks_B = self._compared(queries_BD, blocks_BD)
            loss = losses_B.sum()
        number = torch.full((), float(len(queries_BD)), device=self.device)
        return Losses(torch.zeros((), device=self.device), loss, number)

    def _compared(self, queries_ND: Tensor, blocks_ND: Tensor) -> tuple[Tensor, Tensor]:
        """Losses and ranks of the own block of each query, among the blocks of all ranks."""
        axis, number = self.mesh.data, len(queries_ND)
        scores = queries_ND @ gather(blocks_ND, axis, dim=0).T * self._scale
        own = axis.rank * number + torch.arange(number, device=scores.device)
        losses = F.cross_entropy(scores, own, reduction="none")
        of_own = scores.detach().gather(1, own[:, None])
        return losses, (scores.detach() >= of_own).sum(1) - 1

    # ---- Validation ----

    def measure(self, predicted: Predictions, labels: Labels) -> Tensor:  # noqa: ARG002
        """Queries whose own block is among the best k; of the samples of the last `losses`."""
        ranks_B = self._ranks_B
        right = [(ranks_B < k).sum().float() for k in self._topk]
        number = torch.full((len(right),), float(len(ranks_B)), device=self.device)
        return torch.stack((torch.stack(right), number), dim=1)


def _vectors(predicted: Predictions) -> tuple[Tensor, Tensor]:
    """Vectors (B, D) of queries and of blocks, fp32."""
    queries, blocks = predicted.query_embeddings, predicted.block_embeddings
    assert queries is not None
    assert blocks is not None
    return queries.float(), blocks.float()
