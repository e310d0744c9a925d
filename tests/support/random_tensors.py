"""Random weights in memory: of a new model, and of a model of transformers."""

from typing import Any

import torch
from torch import Tensor

from tokamake.checkpoint.model_tensors import random_weights, shapes
from tokamake.checkpoint.tensors.extents import whole_slices
from tokamake.config.architecture import Architecture


def random_tensors(architecture: Architecture, seed: int) -> dict[str, Tensor]:
    """Return all random weights of a new model in fp32 on the CPU."""
    weights, tensors = random_weights(architecture, seed), {}
    for name, shape in shapes(architecture).items():
        tensors[name] = torch.empty(shape)
        for at, values in weights.tiles(name, shape, place=whole_slices(shape)):
            tensors[name][at] = torch.from_numpy(values)
    return tensors


@torch.no_grad()
def randomized(model: Any, dtype: torch.dtype = torch.float32) -> Any:
    """Add noise to all parameters of a model, also norms and biases; return it without dropout."""
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):  # of routers
            buffer.add_(torch.randn_like(buffer), alpha=0.1)
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.1)
        parameter.data = parameter.data.to(dtype)  # a cast of the model would round its angles
    return model.eval()
