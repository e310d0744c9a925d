"""Adam (Kingma & Ba 2015, arXiv 1412.6980), torch's fused implementation."""

from torch.optim import Adam, Optimizer

from tokamake.config.optimization import OptimizerSettings
from tokamake.optim._groups import adam_options
from tokamake.optim._optimizer_base import Group
from tokamake.optim._sharded_parameters import WholeParameters

SETTINGS = {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "weight_decay": 0.0}
ELEMENTWISE = True
STATE = {"step": "replicated", "exp_avg": "like_parameter", "exp_avg_sq": "like_parameter"}
ZERO_FILES = True


def build(groups: list[Group], settings: OptimizerSettings, *, whole: WholeParameters) -> Optimizer:
    """Make torch's fused Adam. Weight decay is added to the gradient (L2): moments include it."""
    return Adam(groups, **adam_options(settings), fused=True)
