"""Sophia-G (Liu et al. 2023, arXiv 2305.14342): momentum over a diagonal Hessian, clipped.

The Gauss-Newton-Bartlett estimate of the Hessian squares gradients of the loss with labels sampled
from the model, every `hessian_interval` updates.
"""

from collections.abc import Callable
from typing import Any

import torch

from tokamake.config.optimization import OptimizerSettings
from tokamake.optim._groups import adam_options
from tokamake.optim._optimizer_base import Group, ParameterBatch, Rule, decay
from tokamake.optim._sharded_parameters import WholeParameters
from tokamake.runtime.torch_internals import (
    foreach_add_,
    foreach_addcmul_,
    foreach_clamp_max_,
    foreach_clamp_min_,
    foreach_div,
    foreach_lerp_,
    foreach_mul,
    foreach_mul_,
)

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
SAMPLED_LABELS = True


def build(groups: list[Group], settings: OptimizerSettings, *, whole: WholeParameters) -> Rule:
    """Make the optimizer; it has the method `prepare` in addition to `step`."""
    interval, rho = int(settings.used("hessian_interval")), settings.used("rho")
    return SophiaG(groups, interval=interval, whole=whole, **adam_options(settings), rho=rho)


class SophiaG(Rule):
    """Algorithm 3 of the paper with the estimator of algorithm 2."""

    zeros = ("exp_avg", "hessian")

    def __init__(self, groups: list[Group], *, interval: int, **options: Any) -> None:
        super().__init__(groups, **options)
        self._interval = interval

    def prepare(self, sampled_gradients: Callable[[int], int | None]) -> None:
        """Update the Hessian if it is due; call it before the gradients of each step.

        Args:
            sampled_gradients: computes the gradients of labels sampled from the model, with the
                random numbers of an update, and returns the number of these labels; None: the
                gradients are not finite.
        """
        counts = (int(state["step"]) for state in self.state.values() if "step" in state)
        num_updates = max(counts, default=0)
        if num_updates % self._interval == 0 and (num_labels := sampled_gradients(num_updates)):
            self.update_hessian(num_labels)

    @torch.no_grad()
    def update_hessian(self, num_labels: int) -> None:
        """Average num_labels g^2 of the current gradients into the Hessian.

        The gradients are of the mean loss over labels sampled from the model, averaged over
        ranks, without clipping or scaling. The caller clears them afterwards.
        """
        for group in self.param_groups:
            weight = 1.0 - group["betas"][1]
            for batch in self.batches(group):
                hessians = batch.state("hessian")
                foreach_mul_(hessians, group["betas"][1])
                foreach_addcmul_(hessians, batch.gradients, batch.gradients, num_labels * weight)

    def update(self, batch: ParameterBatch, group: Group) -> None:
        """x -= lr decay x; x -= lr clip(m / max(rho h, epsilon), 1)."""
        batch.tick()
        means = batch.state("exp_avg")
        foreach_lerp_(means, batch.gradients, 1.0 - group["betas"][0])
        decay(batch, group)
        scales = foreach_mul(batch.state("hessian"), group["rho"])
        foreach_clamp_min_(scales, group["eps"])
        directions = foreach_div(means, scales)
        foreach_clamp_max_(directions, 1.0)
        foreach_clamp_min_(directions, -1.0)
        foreach_add_(batch.values, directions, alpha=-group["lr"])
