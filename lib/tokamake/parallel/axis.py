"""An axis of the mesh: the ranks in one direction, and the rows that each has; no torch."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor

    from tokamake.parallel.exchange_log import ExchangeLog


@dataclass(frozen=True)
class Axis:
    """One direction of the mesh, as seen by this rank."""

    rank: int = 0
    """Position of this rank on the axis, 0 to size - 1."""
    size: int = 1
    """Number of ranks on the axis."""
    group: "dist.ProcessGroup | None" = None
    """Process group of these ranks; None if this rank has no peers."""
    log: "ExchangeLog | None" = field(default=None, compare=False, repr=False)
    """Log of this rank, in which exchanges with the ranks of the axis note their tensors."""

    def sends(self, tensor: "Tensor") -> None:
        """Note a tensor that this rank has computed and sends to ranks of the axis."""
        if self.log is not None:
            self.log.computed(tensor)

    def received(self, tensor: "Tensor") -> None:
        """Note a tensor that ranks of the axis have sent."""
        if self.log is not None:
            self.log.received(tensor)


SINGLE_RANK_AXIS = Axis()
"""The axis of a rank without peers in this direction."""


def part(size: int, axis: Axis) -> range:
    """Rows that this rank has of `size` rows, divided as by `torch.chunk`.

    Parts are equal, except that the last ranks may have fewer rows, or none.
    """
    each = -(-size // axis.size)
    return range(min(axis.rank * each, size), min((axis.rank + 1) * each, size))
