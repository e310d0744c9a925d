"""Random weights of a new model, whole and in memory."""

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
