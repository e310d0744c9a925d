"""Lion (Chen et al. 2023, arXiv 2302.06675): the sign of an interpolated momentum."""

from tokamake.config.optimization import OptimizerSettings
from tokamake.optim._optimizer_base import Group, ParameterBatch, Rule, decay
from tokamake.optim._sharded_parameters import WholeParameters
from tokamake.runtime.torch_internals import (
    foreach_add_,
    foreach_lerp,
    foreach_lerp_,
    foreach_sign_,
)

SETTINGS = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}
ELEMENTWISE = True
STATE = {"step": "replicated", "exp_avg": "like_parameter"}


def build(groups: list[Group], settings: OptimizerSettings, *, whole: WholeParameters) -> Rule:
    """Make the optimizer; its learning rate should be 3 to 10 times lower than AdamW's."""
    return Lion(groups, whole=whole, lr=settings.learning_rate, betas=settings.betas)


class Lion(Rule):
    """Algorithm 2 of the paper, with decoupled weight decay."""

    zeros = ("exp_avg",)

    def update(self, batch: ParameterBatch, group: Group) -> None:
        """c = beta1 m + (1 - beta1) g; x -= lr (sign(c) + decay x); m by g with beta2."""
        beta1, beta2 = group["betas"]
        batch.tick()
        means = batch.state("exp_avg")
        signs = foreach_lerp(means, batch.gradients, 1.0 - beta1)
        foreach_sign_(signs)
        decay(batch, group)
        foreach_add_(batch.values, signs, alpha=-group["lr"])
        foreach_lerp_(means, batch.gradients, 1.0 - beta2)
