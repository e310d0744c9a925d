"""Sophia-G (Liu et al. 2023, arXiv 2305.14342): momentum over a diagonal Hessian, clipped.

The Gauss-Newton-Bartlett estimate of the Hessian squares gradients of the loss with labels sampled
from the model, every `hessian_interval` updates.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tokamake.config.optimization import OptimizerSettings
from tokamake.optim._extra_pass import ExtraPass
from tokamake.optim._groups import adam_options
from tokamake.optim._optimizer_base import Group, ParameterBatch, Rule, decay
from tokamake.optim._sharded_parameters import WholeParameters
from tokamake.parallel.context import share
from tokamake.parallel.loss import NO_LABEL, drawn
from tokamake.parallel.mesh import SINGLE_RANK, Mesh
from tokamake.runtime.device import copied_to
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
EXTRA_PASS = True
DETERMINISTIC = False


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

    def prepare(self, extra_pass: ExtraPass) -> None:
        """Update the Hessian if it is due; call it before the gradients of each step."""
        counts = (int(state["step"]) for state in self.state.values() if "step" in state)
        num_updates = max(counts, default=0)
        if num_updates % self._interval:
            return
        draws = label_draws(
            len(extra_pass.labels),
            extra_pass.label_shape(),
            seed=extra_pass.seed,
            step=num_updates,
            mesh=extra_pass.mesh,
        )
        if num_labels := extra_pass.gradients(
            lambda number, logits: _sampled_labels(extra_pass, draws, number=number, logits=logits)
        ):
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


def label_draws(
    num_batches: int,
    label_shape: tuple[int, int],
    *,
    seed: int,
    step: int,
    mesh: Mesh = SINGLE_RANK,
) -> list[Tensor]:
    """Random numbers in [0, 1) that draw each label of this rank, (B, L) fp32 for each batch.

    A token of a global batch has the same number however ranks share the batch.
    """
    shape = (num_batches, mesh.data.size, *label_shape)
    # Drawn for all data-parallel ranks: the generator has no cheap way to skip numbers.
    all_ranks = np.random.default_rng((seed, step)).random(shape, dtype=np.float32)
    of_rank = torch.from_numpy(all_ranks[:, mesh.data.rank])
    return [*share(of_rank, axis=mesh.context, dim=2)]


def _sampled_labels(
    extra_pass: ExtraPass, draws: list[Tensor], *, number: int, logits: Tensor
) -> Tensor:
    """Labels of a micro batch, sampled from its logits where it has labels."""
    labels, numbers = extra_pass.labels[number], extra_pass.label_numbers[number]
    chances = copied_to(draws[number].contiguous(), labels.device)
    if numbers is not None:
        chances = chances.flatten()[numbers]
    elif missing := labels.shape[1] - chances.shape[1]:
        chances = F.pad(chances, (0, missing))  # of labels that fill up rows of a decoder
    sampled = drawn(logits, chances, extra_pass.mesh, size=extra_pass.vocab_size)
    return sampled.where(labels != NO_LABEL, labels)
