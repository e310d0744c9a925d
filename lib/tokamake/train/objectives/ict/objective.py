"""The block of a query is found among the blocks of the global batch (arXiv 1906.00300).

Shape suffixes: B samples of a micro batch, N of all micro batches of a rank, L tokens, D width.
"""

import math
from typing import Any

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
from tokamake.train.batch import HostBatch
from tokamake.train.objectives._base import Labels
from tokamake.train.objectives._in_batch import Compared, InBatchObjective
from tokamake.train.objectives.ict.samples import ict_record

_CPU = torch.device("cpu")
_MULTIPLE = 8
"""Lengths of texts in a micro batch are multiples of this."""


class Objective(InBatchObjective):
    """Rows are records of the loader, see `ict_record`."""

    def __init__(self, run: Run, mesh: Mesh = SINGLE_RANK, *, device: torch.device = _CPU) -> None:
        super().__init__(run, mesh, device=device)
        section = objective_section(run.train)
        self._topk: tuple[int, ...] = section.topk
        self.metrics = tuple(f"accuracy_at_{k}" for k in self._topk)
        hidden_size = run.architecture.hidden_size
        self._scale = 1 / math.sqrt(hidden_size) if section.score_scaling else 1.0

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

    def compared(
        self,
        queries_ND: Tensor,
        texts_MD: Tensor,
        sample_labels: Tensor | None,  # noqa: ARG002
    ) -> Compared:
        """Each query has a block, and all other blocks are negatives."""
        axis, number = self.mesh.data, len(queries_ND)
        scores = queries_ND @ gather(texts_MD, axis, dim=0).T * self._scale
        own = axis.rank * number + torch.arange(number, device=scores.device)
        losses = F.cross_entropy(scores, own, reduction="none")
        of_own = scores.detach().gather(1, own[:, None])
        return Compared(losses, (scores.detach() >= of_own).sum(1) - 1)

    # ---- Validation ----

    def measure(self, predicted: Predictions, labels: Labels) -> Tensor:  # noqa: ARG002
        """Queries whose own block is among the best k; of the samples of the last `losses`."""
        ranks_B = self._ranks_B
        right = [(ranks_B < k).sum().float() for k in self._topk]
        number = torch.full((len(right),), float(len(ranks_B)), device=self.device)
        return torch.stack((torch.stack(right), number), dim=1)
