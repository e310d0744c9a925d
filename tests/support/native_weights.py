"""Whole weights of a native checkpoint, read without ranks."""

from pathlib import Path

import torch
from torch import Tensor

from tokamake.checkpoint.native.folder import read_model
from tokamake.checkpoint.native.training_state import fill
from tokamake.checkpoint.torch_files import dcp_metadata
from tokamake.config.architecture import Architecture


def read(folder: Path) -> tuple[Architecture, dict[str, Tensor], int]:
    """Read architecture, whole weights by tensor name, and number of steps."""
    architecture, iteration = read_model(folder)
    tensors = {
        key: torch.empty(value.size, dtype=value.dtype.torch)
        for key, value in dcp_metadata.read(folder).items()
        if key.startswith("model.")
    }
    fill(folder, tensors)
    weights = {key.removeprefix("model."): value for key, value in tensors.items()}
    return architecture, weights, iteration
