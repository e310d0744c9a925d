"""Stochastic gradient descent with momentum; settings in, torch optimizer out."""

from typing import Any

import torch

from tokamake.config import OptimizerSettings


def build(groups: list[dict[str, Any]], settings: OptimizerSettings) -> torch.optim.Optimizer:
    """Make torch's SGD: `beta1` is the momentum, `beta2` and `epsilon` have no meaning.

    Weight decay enters through the gradient (L2), so momentum applies to it too.

    Args:
        groups: parameter groups, each with its own `weight_decay`.
        settings: peak learning rate and momentum.
    """
    return torch.optim.SGD(
        groups, lr=settings.learning_rate, momentum=settings.beta1, foreach=False
    )
