"""Ranks in one direction of the mesh, and what each of them has; no torch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist


@dataclass(frozen=True)
class Axis:
    """One direction of the mesh, as this rank sees it."""

    rank: int = 0
    """This rank's place in it, 0 to size - 1."""
    size: int = 1
    """Ranks in it."""
    group: "dist.ProcessGroup | None" = None
    """Process group of these ranks; None where this rank is alone."""


LONE = Axis()
"""Where a rank has no peers in a direction."""


def part(size: int, axis: Axis) -> range:
    """This rank's part of so many rows: even but for the last ranks, as `torch.chunk` cuts."""
    each = -(-size // axis.size)
    return range(min(axis.rank * each, size), min((axis.rank + 1) * each, size))
