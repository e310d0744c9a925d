"""Muon (Jordan et al. 2024; Liu et al. 2025, arXiv 2502.16982): orthogonalized momentum.

Muon updates hidden matrices; AdamW updates embeddings, output layer, norms and biases.
"""

from typing import Any

import torch
from torch import Tensor

from tokamake.config.optimization import OptimizerSettings
from tokamake.optim._groups import adam_options, part_hidden_matrices
from tokamake.optim._optimizer_base import Group, ParameterBatch, Rule, adamw, decay, number
from tokamake.optim._sharded_parameters import WholeParameters
from tokamake.runtime.torch_internals import foreach_lerp, foreach_lerp_

SETTINGS = {
    "momentum": 0.95,
    "newton_schulz_steps": 5,
    "matrix_learning_rate_ratio": 1.0,
    "beta1": 0.9,
    "beta2": 0.95,
    "epsilon": 1e-8,
    "weight_decay": 0.1,
}
ELEMENTWISE = False
STATE = {
    "step": "replicated",
    "momentum_buffer": "like_parameter",
    "exp_avg": "like_parameter",
    "exp_avg_sq": "like_parameter",
}
FLAT_BUFFERS = False  # It needs the shapes of matrices.

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of Jordan's quintic: singular values become 0.7 to 1.2, not exactly 1."""


def build(groups: list[Group], settings: OptimizerSettings, *, whole: WholeParameters) -> Rule:
    """Make the optimizer; learning rate and weight decay that suit AdamW suit it, too."""
    return Muon(
        part_hidden_matrices(groups),
        whole=whole,
        **adam_options(settings),
        momentum=settings.used("momentum"),
        newton_schulz_steps=int(settings.used("newton_schulz_steps")),
        ratio=settings.used("matrix_learning_rate_ratio"),
    )


class Muon(Rule):
    """Muon with Nesterov momentum and updates of AdamW's size (arXiv 2502.16982, equation 4)."""

    has_owners = True

    def __init__(self, groups: list[Group], **options: Any) -> None:
        super().__init__(groups, **options)
        hidden = (group["params"] for group in self.param_groups if group["hidden"])
        self._hidden = {id(parameter) for parameters in hidden for parameter in parameters}

    def start(self, parameter: Tensor) -> dict[str, Tensor]:
        """Create the momentum of a hidden matrix, or Adam's moments of another parameter."""
        hidden = id(parameter) in self._hidden
        names = ("momentum_buffer",) if hidden else ("exp_avg", "exp_avg_sq")
        return {"step": number(), **{name: self.like(parameter) for name in names}}

    def update(self, batch: ParameterBatch, group: Group) -> None:
        """x -= lr decay x; x -= ratio lr 0.2 sqrt(max(rows, columns)) orthogonal(momentum)."""
        if not group["hidden"]:
            adamw(batch, group)
            return
        batch.tick()
        momentum, means = group["momentum"], batch.state("momentum_buffer")
        foreach_lerp_(means, batch.gradients, 1.0 - momentum)
        nesterov_momentum = foreach_lerp(batch.gradients, means, momentum)
        decay(batch, group)
        # Owners orthogonalize in bf16: half the bytes of fp32 travel.
        parts = [value.bfloat16() for value in nesterov_momentum]
        steps = group["newton_schulz_steps"]
        directions = self.whole.on_owners(
            batch.parameters, parts, function=lambda matrix: orthogonal(matrix, steps)
        )
        for parameter, value, part in zip(batch.parameters, batch.values, directions, strict=True):
            longest = max(self.whole.shape(parameter)[-2:])
            value.add_(part, alpha=-group["ratio"] * group["lr"] * 0.2 * longest**0.5)


def orthogonal(matrix: Tensor, steps: int) -> Tensor:
    """Approximate the nearest matrix with orthonormal rows or columns, in bf16.

    Newton-Schulz iteration: X <- a X + (b A + c A A) X with A = X X^T, from X = matrix / |matrix|.
    In a stack of matrices, each by itself.
    """
    if matrix.dim() > 2:
        return torch.stack([orthogonal(each, steps) for each in matrix])
    a, b, c = COEFFICIENTS
    x = matrix.bfloat16()
    tall = x.shape[0] > x.shape[1]
    if tall:
        x = x.T
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x
