"""Stochastic gradient descent with momentum, torch's implementation."""

from torch.optim import SGD, Optimizer

from tokamake.config.optimization import OptimizerSettings
from tokamake.optim._optimizer_base import Group
from tokamake.optim._sharded_parameters import WholeParameters

SETTINGS = {"momentum": 0.9, "weight_decay": 0.0}
ELEMENTWISE = True
STATE = {"momentum_buffer": "like_parameter"}


def build(groups: list[Group], settings: OptimizerSettings, *, whole: WholeParameters) -> Optimizer:
    """Make torch's SGD. Weight decay is added to the gradient (L2), so momentum includes it."""
    return SGD(groups, lr=settings.learning_rate, momentum=settings.used("momentum"), foreach=False)
