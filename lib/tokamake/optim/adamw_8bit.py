"""AdamW with 8-bit moments in blocks (Dettmers et al. 2022, arXiv 2110.02861), from torchao."""

import contextlib
from typing import Any

import torch
from torch.optim import Optimizer

from tokamake.config.optimization import OptimizerSettings
from tokamake.errors import UserError
from tokamake.optim import _torchao_internals as torchao
from tokamake.optim._groups import adam_options
from tokamake.optim._optimizer_base import Group
from tokamake.optim._sharded_parameters import WholeParameters
from tokamake.runtime.device_types import device_type

SETTINGS = {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1}
ELEMENTWISE = False  # Blocks of 256 elements share a scale; small parts stay in 32 bits.
STATE = {"step": "replicated", "exp_avg": "like_parameter", "exp_avg_sq": "like_parameter"}
STATE_BYTES = 1.015625  # 1 byte, and the fp32 scale of a block: 4 / 256
FLAT_BUFFERS = False  # States are quantized tensors.
PACKAGES = ("torchao",)


def build(groups: list[Group], settings: OptimizerSettings, *, whole: WholeParameters) -> Optimizer:
    """Make torchao's AdamW8bit. Its blocks are of local parts: layouts differ slightly."""
    try:
        from torchao.optim import AdamW8bit
    except ImportError as error:
        raise UserError(
            f"train.optimizer.name: adamw_8bit: {error}; run `pip install torchao`"
        ) from None

    class Optimizer(AdamW8bit):
        """AdamW8bit that accepts rates as numbers and saves moments as plain tensors.

        torchao refuses some numbers as rates, and compiles the step again for each new one.
        Checkpoints hold plain tensors because blocks depend on the layout; loading rounds to 8
        bits again.
        """

        def plain(self, value: torch.Tensor) -> torch.Tensor:
            return value.dequantize() if hasattr(value, "codes") else value

        def packed(self, parameter: torch.Tensor, kind: str, value: torch.Tensor) -> torch.Tensor:
            return torchao.new_buffer(self, parameter, signed=kind == "exp_avg").copy_(value)

        def step(self, closure: Any = None) -> Any:
            parameters = (p for group in self.param_groups for p in group["params"])
            compiles = any(device_type(p.device).compiles for p in parameters)
            eager = contextlib.nullcontext()
            if not compiles:
                eager = torch.compiler.set_stance("force_eager")
            for group in self.param_groups:
                for name in ("lr", "weight_decay"):
                    group[name] = torch.as_tensor(group[name], dtype=torch.float32)
            with eager:
                return super().step(closure)

    return Optimizer(groups, **adam_options(settings))
