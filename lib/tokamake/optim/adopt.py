"""ADOPT (Taniguchi et al. 2024, arXiv 2411.02853): Adam that converges with any beta2.

A gradient is divided by the second moment of earlier gradients; momentum is applied afterwards.
"""

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
    foreach_mul_,
    foreach_sqrt,
)

SETTINGS = {"beta1": 0.9, "beta2": 0.9999, "epsilon": 1e-6, "weight_decay": 0.1}
ELEMENTWISE = True
STATE = {"step": "replicated", "exp_avg": "like_parameter", "exp_avg_sq": "like_parameter"}


def build(groups: list[Group], settings: OptimizerSettings, *, whole: WholeParameters) -> Rule:
    return Adopt(groups, whole=whole, **adam_options(settings))


class Adopt(Rule):
    """Algorithm 2 of the paper, clipped at step^0.25, with decoupled weight decay."""

    zeros = ("exp_avg", "exp_avg_sq")

    def update(self, batch: ParameterBatch, group: Group) -> None:
        """m by clip(g / max(sqrt(v), eps)); x -= lr (m + decay x); v by g^2. Step 1 only sets v."""
        beta1, beta2 = group["betas"]
        first = [step == 1 for step in batch.tick()]
        if any(first):
            new = batch.only(first)
            squares = new.state("exp_avg_sq")
            foreach_addcmul_(squares, new.gradients, new.gradients)
            batch = batch.only([not is_first for is_first in first])
        if not batch.parameters:
            return
        decay(batch, group)
        means, squares = batch.state("exp_avg"), batch.state("exp_avg_sq")
        roots = foreach_sqrt(squares)
        foreach_clamp_min_(roots, group["eps"])
        scaled = foreach_div(batch.gradients, roots)
        clips = [(state["step"].item() - 1) ** 0.25 for state in batch.states]
        foreach_clamp_max_(scaled, clips)
        foreach_clamp_min_(scaled, [-clip for clip in clips])
        foreach_lerp_(means, scaled, 1.0 - beta1)
        foreach_add_(batch.values, means, alpha=-group["lr"])
        foreach_mul_(squares, beta2)
        foreach_addcmul_(squares, batch.gradients, batch.gradients, 1.0 - beta2)
