"""Schedule-free SGD (Defazio et al. 2024, arXiv 2405.15682): averaged weights, constant rate."""

from tokamake.config.optimization import OptimizerSettings
from tokamake.optim._optimizer_base import Group, ParameterBatch, Rule
from tokamake.optim._schedule_free import ScheduleFree
from tokamake.optim._sharded_parameters import WholeParameters

SETTINGS = {"momentum": 0.9, "weight_decay": 0.0}
ELEMENTWISE = True
STATE = {
    "step": "replicated",
    "largest_rate": "replicated",
    "weight_sum": "replicated",
    "z": "like_parameter",
}
AVERAGES_WEIGHTS = True


def build(groups: list[Group], settings: OptimizerSettings, *, whole: WholeParameters) -> Rule:
    """Make the optimizer; it has the methods `train` and `eval` in addition to `step`."""
    return ScheduleFreeSGD.build(groups, settings, whole=whole, share="momentum")


class ScheduleFreeSGD(ScheduleFree):
    """Equations 3 to 5 of the paper, with SGD as the base optimizer."""

    def update(self, batch: ParameterBatch, group: Group) -> None:
        """Move along the gradients."""
        batch.tick()
        # `move` adds weight decay in place, and a rule does not change gradients.
        directions = [gradient.clone() for gradient in batch.gradients]
        self.move(batch, directions, group=group)
