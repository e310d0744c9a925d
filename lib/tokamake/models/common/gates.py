"""Products of gates and up projections, inside gated MLPs.

Shape suffixes: R rows, I inner width.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tokamake.config.architecture import Architecture
from tokamake.models.common.layers import ACTIVATIONS

Gated = Callable[[Tensor, Tensor], Tensor]
"""Maps gates and up projections to the states between the matrix products."""


def gated(architecture: Architecture) -> Gated:
    """The activation of the gate times the up projection; clamped if there is a `swiglu_limit`."""
    own = architecture.model_extra or {}
    if "swiglu_limit" in own:
        return partial(clamped_swiglu, alpha=own["swiglu_alpha"], limit=own["swiglu_limit"])
    activation = ACTIVATIONS[architecture.hidden_act]
    return lambda gate, up: activation(gate) * up


def clamped_swiglu(gate_RI: Tensor, up_RI: Tensor, *, alpha: float, limit: float) -> Tensor:
    """(up + 1) · gate · σ(alpha · gate): gates are at most `limit`, the others ± `limit` (gpt-oss).

    The backward pass computes the intermediate results again: nothing else is saved.
    """
    result: Tensor = _ClampedSwiGLU.apply(gate_RI, up_RI, alpha, limit)
    return result


class _ClampedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.alpha, ctx.limit = alpha, limit
        gate = gate.clamp(max=limit)
        return torch.sigmoid(alpha * gate).mul_(gate).mul_(up.clamp(-limit, limit).add_(1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of gates and up projections; 0 where they were clamped."""
        gate, up = ctx.saved_tensors
        alpha, limit = ctx.alpha, ctx.limit
        clamped, more = gate.clamp(max=limit), up.clamp(-limit, limit).add_(1)
        sigmoid = torch.sigmoid(alpha * clamped)
        of_up = (grad * clamped).mul_(sigmoid).mul_(up.abs() <= limit)
        slope = (1 - sigmoid).mul_(clamped).mul_(alpha).add_(1).mul_(sigmoid)
        of_gate = slope.mul_(more).mul_(grad).mul_(gate <= limit)
        return of_gate, of_up, None, None
