"""Sophia-G (Liu et al. 2023, arXiv 2305.14342): momentum over a diagonal Hessian, clipped.

The Hessian is estimated by Gauss, Newton and Bartlett: squared gradients of the loss with labels
drawn from the model itself. The trainer makes those gradients where `needs_hessian` says so.
"""

from typing import Any

import torch

from tokamake.config.optimization import OptimizerSettings
from tokamake.optim._rule import Group, ParameterBatch, Rule, decay
from tokamake.optim._whole import ALONE, WholeParameters

SETTINGS = {
    "beta1": 0.965,
    "beta2": 0.99,
    "rho": 0.05,
    "epsilon": 1e-12,
    "hessian_interval": 10,
    "weight_decay": 0.2,
}
ELEMENTWISE = True
STATE = {"step": "replicated", "exp_avg": "like_parameter", "hessian": "like_parameter"}


def build(
    groups: list[dict[str, Any]], settings: OptimizerSettings, whole: WholeParameters = ALONE
) -> torch.optim.Optimizer:
    """Make the optimizer, which has `update_hessian` beside `step`.

    Args:
        groups: parameter groups, each with its own `weight_decay`.
        settings: peak learning rate, betas, rho (the paper's gamma) and epsilon.
        whole: of no use to a rule that knows single elements.
    """
    return SophiaG(
        groups,
        whole=whole,
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.used("epsilon"),
        rho=settings.used("rho"),
    )


def needs_hessian(step: int, settings: OptimizerSettings) -> bool:
    """Whether `update_hessian` comes before the update that follows `step` finished ones."""
    return step % int(settings.used("hessian_interval")) == 0


class SophiaG(Rule):
    """Algorithm 3 of the paper with the estimator of its algorithm 2."""

    zeros = ("exp_avg", "hessian")

    @torch.no_grad()
    def update_hessian(self, num_labels: int) -> None:
        """Take the gradients that parameters hold now into the Hessian: h by num_labels g^2.

        They are those of the mean loss over labels drawn from the model's own predictions,
        averaged over ranks, not clipped, not scaled; the caller clears them afterwards.

        Args:
            num_labels: labels that the loss is the mean of, on all ranks together.
        """
        for group in self.param_groups:
            weight = 1.0 - group["betas"][1]
            for batch in self.batches(group):
                hessians = batch.state("hessian")
                torch._foreach_mul_(hessians, group["betas"][1])
                torch._foreach_addcmul_(
                    hessians, batch.gradients, batch.gradients, num_labels * weight
                )

    def update(self, batch: ParameterBatch, group: Group) -> None:
        """x -= lr decay x; x -= lr clip(m / max(rho h, epsilon), 1)."""
        batch.tick()
        means = batch.state("exp_avg")
        torch._foreach_lerp_(means, batch.gradients, 1.0 - group["betas"][0])
        decay(batch, group)
        scales = torch._foreach_mul(batch.state("hessian"), group["rho"])
        torch._foreach_clamp_min_(scales, group["eps"])
        directions = torch._foreach_div(means, scales)
        torch._foreach_clamp_max_(directions, 1.0)
        torch._foreach_clamp_min_(directions, -1.0)
        torch._foreach_add_(batch.values, directions, alpha=-group["lr"])
