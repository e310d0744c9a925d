"""Losses whose gradients enter the backward pass beside the loss of the output.

So a pipeline stage computes its own losses only, and recomputation does not count a loss twice.
"""

from typing import Any, Protocol

import torch
from torch import Tensor


class LossSums(Protocol):
    """Sums of losses of a step; they know the factors of gradients."""

    def gradient(self, number: int, measured: Tensor) -> Tensor:
        """Gradient of the loss of a layer in a micro batch; counts what it has measured there."""


def with_loss(x: Tensor, loss: Tensor, *, sums: LossSums, number: int, measured: Tensor) -> Tensor:
    """A tensor, unchanged; its backward pass also begins the one of a loss, a scalar.

    Args:
        number: number of the layer that has the loss.
        measured: measurements that `sums` counts in the backward pass.
    """
    same: Tensor = _WithLoss.apply(x, loss, sums, number, measured)
    return same


class _WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        loss: Tensor,  # noqa: ARG004
        sums: LossSums,
        number: int,
        measured: Tensor,
    ) -> Tensor:
        """Return x as it is; `sums` counts `measured` in the backward pass."""
        ctx.sums, ctx.number, ctx.measured = sums, number, measured
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, ctx.sums.gradient(ctx.number, ctx.measured), None, None, None
