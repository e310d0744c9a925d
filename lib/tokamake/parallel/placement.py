"""Placement of parameters: the dimension that ranks divide, partial gradients, decay.

A family states it for each of its modules, and so do the layers of `parallel.tensor`.
"""

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Placement:
    """How the ranks hold a parameter, and how optimizers treat it: a family states both."""

    dim: int | None = None
    """Dimension that tensor-parallel ranks divide, as by `torch.chunk`; None: replicated."""
    partial: bool = False
    """Whether gradients are partial: they must be summed over the tensor-parallel ranks."""
    axes: tuple[tuple[str, int], ...] = ()
    """Further axes of the mesh that divide it, such as ranks that share experts, and the dimension
    that each divides. They are taken from the ranks that shard parameters."""
    decays: bool | None = None
    """Whether it has weight decay; None: if it has two or more dimensions."""
    hidden: bool | None = None
    """Whether muon updates it as a matrix, or as a stack of matrices along the first dimensions;
    None: if it is a matrix of a numbered layer."""


def placements(model: nn.Module) -> dict[str, Placement]:
    """Placement of each parameter, by name; call it before FSDP2 or DeepSpeed wraps the model."""
    by_name = {}
    for prefix, module in model.named_modules():
        of_module = getattr(module, "placements", {})
        for name, _ in module.named_parameters(recurse=False):
            full = f"{prefix}.{name}" if prefix else name
            by_name[full] = of_module.get(name, Placement())
    return by_name
