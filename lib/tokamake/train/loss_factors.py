"""Factors that turn sums of losses over a global batch into means."""

from typing import NamedTuple

from torch import Tensor


class LossFactors(NamedTuple):
    """1/labels and 1/samples of a global batch: turn sums of losses into means."""

    tokens: float | Tensor = 1.0
    """Factor of the loss of tokens; an fp64 scalar of the device, if that has counted the labels.
    """
    samples: float = 1.0
    """Factor of the loss of whole samples."""
    rows: float | Tensor | None = None
    """Factor of the losses of routers, which are sums over rows; None: there are none."""
    further: tuple[float | Tensor, ...] = ()
    """Factor of the losses of each layer that predicts further tokens; empty: there are none."""

    def times(self, factor: float) -> "LossFactors":
        scaled = LossFactors(self.tokens * factor, self.samples * factor, self.rows, self.further)
        return scaled.times_added(factor)

    def times_added(self, factor: float) -> "LossFactors":
        """Scale the losses that enter the backward pass beside the loss of the output."""
        rows = None if self.rows is None else self.rows * factor
        return self._replace(rows=rows, further=tuple(each * factor for each in self.further))

    def mean(self, total: Tensor) -> Tensor:
        """A sum of losses of tokens, fp32, as a mean."""
        # A factor of Python is rounded to fp32, too.
        return total * (self.tokens.float() if isinstance(self.tokens, Tensor) else self.tokens)


SUM_OF_TOKENS = LossFactors(samples=0.0)
"""The sum of the losses of tokens, without losses of samples."""
