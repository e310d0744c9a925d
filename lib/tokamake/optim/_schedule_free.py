"""Schedule-free optimizers (Defazio et al. 2024, arXiv 2405.15682): averages, a constant rate.

The package `schedulefree` keeps its counts in parameter groups. Here they are in the state of each
parameter, because checkpoints hold that state.
"""

from typing import Any, Self

import torch
from torch import Tensor

from tokamake.config.optimization import OptimizerSettings
from tokamake.errors import UserError
from tokamake.optim._optimizer_base import Group, ParameterBatch, Rule, number, wide
from tokamake.optim._sharded_parameters import WholeParameters, local
from tokamake.runtime.torch_internals import foreach_add_


class ScheduleFree(Rule):
    """Iterates z, and their average x. In training, parameters hold y, between both; otherwise x.

    A new optimizer is not in training. Checkpoints hold x: call `eval` before saving or loading,
    and `train` afterwards. A rule computes directions and calls `move`.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._training = False

    @classmethod
    def build(
        cls,
        groups: list[Group],
        settings: OptimizerSettings,
        *,
        whole: WholeParameters,
        share: str,
        **options: Any,
    ) -> Self:
        """Make the optimizer; `share` names the setting that is the share of x in y."""
        if not (value := settings.used(share)):
            raise UserError(f"train.optimizer.{share}: 0: {settings.name} needs more, such as 0.9")
        return cls(groups, whole=whole, lr=settings.learning_rate, share=value, **options)

    def start(self, parameter: Tensor) -> dict[str, Tensor]:
        """Create the iterate z, which starts at the parameter, zeros and counts."""
        z = self.like(parameter)
        local(z).copy_(local(parameter.detach()))
        counts = {name: number() for name in ("largest_rate", "weight_sum")}
        return {**super().start(parameter), **counts, "z": z}

    def train(self) -> None:
        """Store y = share x + (1 - share) z in the parameters."""
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
            share = group["share"]
            weight = 1.0 - share if training else 1.0 - 1.0 / share
            for parameter in group["params"]:
                if state := self.state.get(parameter):
                    part = local(parameter.detach())
                    part.copy_(part.to(wide(parameter)).lerp_(local(state["z"]), weight))

    def step(self, closure: Any = None) -> Any:
        """Update all parameters that have a gradient; gradients are taken at y."""
        if not self._training:
            raise RuntimeError("call train() of the optimizer before gradients are computed")
        return super().step(closure)

    def move(self, batch: ParameterBatch, directions: list[Tensor], *, group: Group) -> None:
        """z -= lr (direction + decay y); x = (1 - c) x + c z; y = share x + (1 - share) z."""
        rate, share, z = group["lr"], group["share"], batch.state("z")
        if group["weight_decay"]:
            foreach_add_(directions, batch.values, alpha=group["weight_decay"])
        weights = [_average_weight(state, rate) for state in batch.states]
        # x is not stored. Substitute x = (y - (1 - share) z) / share and solve for the new y.
        for value, iterate, weight in zip(batch.values, z, weights, strict=True):
            value.lerp_(iterate, weight)
        scales = [rate * (share * (1.0 - weight) - 1.0) for weight in weights]
        for value, direction, scale in zip(batch.values, directions, scales, strict=True):
            value.add_(direction, alpha=scale)
        foreach_add_(z, directions, alpha=-rate)


def _average_weight(state: dict[str, Tensor], rate: float) -> float:
    """Weight c of the newest z in the average, from the square of the largest rate so far."""
    state["largest_rate"].clamp_(min=rate)
    weight = state["largest_rate"] ** 2
    state["weight_sum"] += weight
    return float(weight / state["weight_sum"]) if weight else 0.0
