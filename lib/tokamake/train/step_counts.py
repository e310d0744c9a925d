"""Numbers of labels, rows and samples of a step: on the device, so that the host need not wait."""

from typing import NamedTuple

import torch
from torch import Tensor

from tokamake.train.loss_factors import LossFactors


class StepCounts(NamedTuple):
    """Sums over all ranks; scalars of the device where it has counted them."""

    labels: int | Tensor
    """Tokens with a loss."""
    rows: int | Tensor
    samples: int = 0
    """Samples with a loss of their own."""
    further: Tensor | None = None
    """(K,) labels of each layer that predicts further tokens; None: the model has none."""

    @property
    def factors(self) -> LossFactors:
        labels = self.labels
        # The same number as on the host.
        known = labels.clamp(min=1).double() if isinstance(labels, Tensor) else max(1, labels)
        rows = self.rows
        of_rows = rows.clamp(min=1).double() if isinstance(rows, Tensor) else max(1, rows)
        of_further = () if self.further is None else 1 / self.further.clamp(min=1).double()
        return LossFactors(1 / known, 1 / max(1, self.samples), 1 / of_rows, (*of_further,))

    def read(self, sums: Tensor) -> tuple[list[float], int, int, list[float]]:
        """Sums, labels, rows and further labels on the host.

        A step waits for the device here alone.
        """
        labels, rows = self.labels, self.rows
        if isinstance(labels, Tensor) and isinstance(rows, Tensor):
            further = labels.new_empty(0) if self.further is None else self.further
            joined = torch.cat((torch.stack((labels, rows)), further, sums.double()))
            num_labels, num_rows, *values = joined.tolist()
            return values[len(further) :], int(num_labels), int(num_rows), values[: len(further)]
        return sums.tolist(), int(labels), int(rows), []
