"""Stochastic gradient descent with momentum, torch's implementation."""

from typing import Any

import torch

from tokamake.config.optimization import OptimizerSettings
from tokamake.optim._sharded_parameters import UNSHARDED, WholeParameters

SETTINGS = {"momentum": 0.9, "weight_decay": 0.0}
ELEMENTWISE = True
STATE = {"momentum_buffer": "like_parameter"}


def build(
    groups: list[dict[str, Any]], settings: OptimizerSettings, *, whole: WholeParameters = UNSHARDED
) -> torch.optim.Optimizer:
    """Make torch's SGD. Weight decay is added to the gradient (L2), so momentum includes it."""
    return torch.optim.SGD(
        groups, lr=settings.learning_rate, momentum=settings.used("momentum"), foreach=False
    )
