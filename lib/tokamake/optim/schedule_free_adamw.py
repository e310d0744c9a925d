"""Schedule-free AdamW (Defazio et al. 2024, arXiv 2405.15682): averaged weights, constant rate."""

from tokamake.config.optimization import OptimizerSettings
from tokamake.optim._optimizer_base import Group, ParameterBatch, Rule
from tokamake.optim._schedule_free import ScheduleFree
from tokamake.optim._sharded_parameters import WholeParameters
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


def build(groups: list[Group], settings: OptimizerSettings, *, whole: WholeParameters) -> Rule:
    """Make the optimizer; it has the methods `train` and `eval` in addition to `step`."""
    options = {"betas": settings.betas, "eps": settings.used("epsilon")}
    return ScheduleFreeAdamW.build(groups, settings, whole=whole, share="beta1", **options)


class ScheduleFreeAdamW(ScheduleFree):
    """Algorithm 1 of the paper."""

    zeros = ("exp_avg_sq",)

    def update(self, batch: ParameterBatch, group: Group) -> None:
        """Move along the gradients, divided by the roots of their second moments."""
        _, beta2 = group["betas"]
        steps, squares = batch.tick(), batch.state("exp_avg_sq")
        foreach_mul_(squares, beta2)
        foreach_addcmul_(squares, batch.gradients, batch.gradients, 1.0 - beta2)
        roots = foreach_sqrt(squares)
        foreach_div_(roots, [(1.0 - beta2**step) ** 0.5 for step in steps])
        foreach_add_(roots, group["eps"])
        self.move(batch, [*foreach_div(batch.gradients, roots)], group=group)
