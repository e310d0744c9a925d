"""LAMB (You et al. 2020, arXiv 1904.00962): Adam's update, scaled to the norm of each weight."""

import torch
from torch import Tensor

from tokamake.config.optimization import OptimizerSettings
from tokamake.optim._groups import adam_options
from tokamake.optim._optimizer_base import Group, ParameterBatch, Rule, adam_direction
from tokamake.optim._sharded_parameters import WholeParameters
from tokamake.runtime.torch_internals import foreach_add_, foreach_mul_

SETTINGS = {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-6, "weight_decay": 0.01}
ELEMENTWISE = False
STATE = {"step": "replicated", "exp_avg": "like_parameter", "exp_avg_sq": "like_parameter"}


def build(groups: list[Group], settings: OptimizerSettings, *, whole: WholeParameters) -> Rule:
    """Make the optimizer; a group without decay is not scaled, as in the authors' BERT."""
    return Lamb(groups, whole=whole, **adam_options(settings))


class Lamb(Rule):
    """Algorithm 2 of the paper; the scaling function is the identity."""

    zeros = ("exp_avg", "exp_avg_sq")

    def update(self, batch: ParameterBatch, group: Group) -> None:
        """With u = adam + decay x: x -= lr |x| / |u| u, or lr u where either norm is 0."""
        directions = adam_direction(batch, group)
        if group["weight_decay"]:
            foreach_add_(directions, batch.values, alpha=group["weight_decay"])
        if group.get("decays", True):
            foreach_mul_(directions, self._ratios(batch, directions))
        foreach_add_(batch.values, directions, alpha=-group["lr"])

    def _ratios(self, batch: ParameterBatch, directions: list[Tensor]) -> list[Tensor]:
        squares = [
            torch.stack((value.square().sum(), direction.square().sum()))
            for value, direction in zip(batch.values, directions, strict=True)
        ]
        ratios = []
        for value, direction in map(torch.sqrt, self.whole.sum(batch.parameters, squares)):
            positive = (value > 0) & (direction > 0)
            ratios.append(torch.where(positive, value / direction, torch.ones_like(value)))
        return ratios
