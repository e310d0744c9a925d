"""Tensors in memory as a model type of transformers has them, and back."""

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

from tokamake.checkpoint import model_tensors
from tokamake.checkpoint.hf import config_json
from tokamake.config.architecture import Architecture


def to_hf(architecture: Architecture, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename, fuse and transpose tensors of tokamake."""
    model_format = config_json.format_for(architecture)
    ranges: dict[str, dict[int, Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        for rows, start in model_format.rows(architecture, name, len(tensor)):
            ranges[model_format.name(name)][start] = tensor[rows]
    stored = {
        name: torch.cat([rows for _, rows in sorted(parts.items())])
        for name, parts in ranges.items()
    }
    for name in {model_format.name(name) for name in tensors if model_format.is_transposed(name)}:
        stored[name] = stored[name].mT
    stored |= {name: stored[name][None] for name in model_format.as_rows.values()}
    return stored | {
        name: stored[model_format.name(ours)] for name, ours in model_format.twice.items()
    }


def from_hf(architecture: Architecture, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tokamake's tensors, contiguous."""
    model_format, tensors = config_json.format_for(architecture), dict[str, Tensor]()
    for name, shape in model_tensors.shapes(architecture).items():
        tensor = stored[model_format.name(name)]
        tensor = tensor.mT if model_format.is_transposed(name) else tensor
        tensor = tensor[0] if name in model_format.as_rows else tensor
        ranges = model_format.rows(architecture, name, shape[0])
        tensors[name] = torch.cat(
            [tensor[start : start + rows.stop - rows.start] for rows, start in ranges]
        )
    return tensors
