"""Numbers of labels, rows and samples of a step: on the device, so that the host need not wait."""

from typing import NamedTuple

import torch
from torch import Tensor

from tokamake.train.pipeline_stages import LossFactors


class StepCounts(NamedTuple):
    """Sums over all ranks; scalars of the device where it has counted them."""

    labels: int | Tensor
    """Tokens with a loss."""
    rows: int | Tensor
    samples: int = 0
    """Samples with a loss of their own."""

    @property
    def factors(self) -> LossFactors:
        labels = self.labels
        # The same number as on the host.
        known = labels.clamp(min=1).double() if isinstance(labels, Tensor) else max(1, labels)
        rows = self.rows
        of_rows = rows.clamp(min=1).double() if isinstance(rows, Tensor) else max(1, rows)
        return LossFactors(1 / known, 1 / max(1, self.samples), 1 / of_rows)

    def read(self, sums: Tensor) -> tuple[list[float], int, int]:
        """Sums, labels and rows on the host; a step waits for the device here alone."""
        labels, rows = self.labels, self.rows
        if isinstance(labels, Tensor) and isinstance(rows, Tensor):
            joined = torch.cat((sums.double(), torch.stack((labels, rows))))
            *values, num_labels, num_rows = joined.tolist()
            return values, int(num_labels), int(num_rows)
        return sums.tolist(), int(labels), int(rows)
