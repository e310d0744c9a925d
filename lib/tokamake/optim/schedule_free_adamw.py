"""Schedule-free AdamW (Defazio et al. 2024, arXiv 2405.15682): averaged weights, constant rate.

The package `schedulefree` keeps its counts in parameter groups. Here they are in the state of each
parameter, because checkpoints hold that state.
"""

from typing import Any

import torch
from torch import Tensor

from tokamake.config.optimization import OptimizerSettings
from tokamake.errors import UserError
from tokamake.optim._optimizer_base import Group, ParameterBatch, Rule, number, wide
from tokamake.optim._sharded_parameters import UNSHARDED, WholeParameters, local
from tokamake.runtime.torch_internals import (
    foreach_add_,
    foreach_addcmul_,
    foreach_div,
    foreach_div_,
    foreach_mul_,
    foreach_sqrt,
)

SETTINGS = {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1}
ELEMENTWISE = True
STATE = {
    "step": "replicated",
    "largest_rate": "replicated",
    "weight_sum": "replicated",
    "z": "like_parameter",
    "exp_avg_sq": "like_parameter",
}
AVERAGES_WEIGHTS = True


def build(
    groups: list[dict[str, Any]], settings: OptimizerSettings, *, whole: WholeParameters = UNSHARDED
) -> torch.optim.Optimizer:
    """Make the optimizer; it has the methods `train` and `eval` in addition to `step`.

    Args:
        groups: parameter groups, each with its own `weight_decay`.
        settings: learning rate after warm-up, betas and epsilon.
        whole: unused, because the update is elementwise.

    Raises:
        UserError: beta1 is 0. Then y equals z, and x cannot be computed from them.
    """
    if not settings.used("beta1"):
        raise UserError("train.optimizer.beta1: 0: schedule_free_adamw needs more, such as 0.9")
    return ScheduleFreeAdamW(
        groups,
        whole=whole,
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.used("epsilon"),
    )


class ScheduleFreeAdamW(Rule):
    """Algorithm 1 of the paper. In training, parameters hold y; otherwise x, the average.

    A new optimizer is not in training. Checkpoints hold x: call `eval` before saving or loading,
    and `train` afterwards.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._training = False

    def start(self, parameter: Tensor) -> dict[str, Tensor]:
        """Create the iterate z, which starts at the parameter, second moments and counts."""
        z = self.like(parameter)
        local(z).copy_(local(parameter.detach()))
        counts = {name: number() for name in ("step", "largest_rate", "weight_sum")}
        return {**counts, "z": z, "exp_avg_sq": self.like(parameter)}

    def train(self) -> None:
        """Store y = beta1 x + (1 - beta1) z in the parameters."""
        self._switch(training=True)

    def eval(self) -> None:
        """Store x in the parameters."""
        self._switch(training=False)

    @torch.no_grad()
    def _switch(self, *, training: bool) -> None:
        if training == self._training:
            return
        self._training = training
        for group in self.param_groups:
            beta1 = group["betas"][0]
            weight = 1.0 - beta1 if training else 1.0 - 1.0 / beta1
            for parameter in group["params"]:
                if state := self.state.get(parameter):
                    part = local(parameter.detach())
                    part.copy_(part.to(wide(parameter)).lerp_(local(state["z"]), weight))

    def step(self, closure: Any = None) -> Any:
        """Update all parameters that have a gradient; gradients are those at y."""
        if not self._training:
            raise RuntimeError("call train() of the optimizer before gradients are computed")
        return super().step(closure)

    def update(self, batch: ParameterBatch, group: Group) -> None:
        """z -= lr (g / sqrt(v) + decay y); x = (1 - c) x + c z; y = beta1 x + (1 - beta1) z."""
        (beta1, beta2), rate = group["betas"], group["lr"]
        steps, squares, z = batch.tick(), batch.state("exp_avg_sq"), batch.state("z")
        foreach_mul_(squares, beta2)
        foreach_addcmul_(squares, batch.gradients, batch.gradients, 1.0 - beta2)
        roots = foreach_sqrt(squares)
        foreach_div_(roots, [(1.0 - beta2**step) ** 0.5 for step in steps])
        foreach_add_(roots, group["eps"])
        directions = foreach_div(batch.gradients, roots)
        if group["weight_decay"]:
            foreach_add_(directions, batch.values, alpha=group["weight_decay"])
        weights = [_average_weight(state, rate) for state in batch.states]
        # x is not stored. Substitute x = (y - (1 - beta1) z) / beta1 and solve for the new y.
        for value, iterate, weight in zip(batch.values, z, weights, strict=True):
            value.lerp_(iterate, weight)
        scales = [rate * (beta1 * (1.0 - weight) - 1.0) for weight in weights]
        for value, direction, scale in zip(batch.values, directions, scales, strict=True):
            value.add_(direction, alpha=scale)
        foreach_add_(z, directions, alpha=-rate)


def _average_weight(state: dict[str, Tensor], rate: float) -> float:
    """Weight c of the newest z in the average, from the square of the largest rate so far."""
    state["largest_rate"].clamp_(min=rate)
    weight = state["largest_rate"] ** 2
    state["weight_sum"] += weight
    return float(weight / state["weight_sum"]) if weight else 0.0
