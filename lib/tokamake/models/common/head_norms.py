"""Norms of queries and keys before rotation (QK-norm): of each head, or over all heads.

Shape suffixes: B batch, L tokens, H heads of this rank, K width of a head.
"""

import torch
from torch import Tensor, nn

from tokamake.config.architecture import Architecture
from tokamake.parallel.axis import part
from tokamake.parallel.collectives import add, copy
from tokamake.parallel.mesh import Mesh
from tokamake.parallel.placement import Placement
from tokamake.parallel.tensor import CenteredNorm


class HeadRMSNorm(nn.RMSNorm):
    """Root-mean-square norm of each head (Qwen3); the ranks divide the heads."""

    def __init__(self, architecture: Architecture, mesh: Mesh, *, num_heads: int) -> None:  # noqa: ARG002
        super().__init__(architecture.head_dim, eps=architecture.rms_norm_eps)
        self.placements = {"weight": Placement(partial=mesh.tensor.size > 1)}


class CenteredHeadRMSNorm(CenteredNorm, HeadRMSNorm):
    """`HeadRMSNorm` whose factor is 1 + weight (Gemma 3)."""


class AllHeadsRMSNorm(nn.Module):
    """Root-mean-square norm over all heads of a token together (OLMo 2).

    The ranks divide the weight by heads and sum their squares. Where several ranks share a key
    head, each has the whole weight, and a head counts once.
    """

    def __init__(self, architecture: Architecture, mesh: Mesh, *, num_heads: int) -> None:
        super().__init__()
        axis, width = mesh.tensor, architecture.head_dim
        self._axis, self._eps = axis, architecture.rms_norm_eps
        self._total = num_heads * width
        self._copies = 1 if num_heads % axis.size == 0 else axis.size // num_heads
        self._rows = slice(None)
        number = self._total
        if self._copies > 1:
            head = axis.rank * num_heads // axis.size
            self._rows = slice(head * width, (head + 1) * width)
            self.placements = {"weight": Placement(partial=True)}
        elif axis.size > 1:
            number = len(part(num_heads, axis)) * width
            self.placements = {"weight": Placement(0)}
        self.weight = nn.Parameter(torch.ones(number))

    def forward(self, x_BLHK: Tensor) -> Tensor:
        """Norm the heads of a token together; the ranks that divide them must call it together."""
        x_BLE = x_BLHK.flatten(-2)
        weight = self.weight[self._rows]
        if self._axis.size == 1:
            return nn.functional.rms_norm(x_BLE, weight.shape, weight, self._eps).view_as(x_BLHK)
        wide = x_BLE.float()
        squares = wide.square().sum(-1, keepdim=True) / self._copies
        # Each rank's heads depend on the sum: its gradient is summed over the ranks, too.
        squares = copy(add(squares, self._axis), self._axis)
        normed = wide * torch.rsqrt(squares / self._total + self._eps)
        return (normed * weight).to(x_BLHK.dtype).view_as(x_BLHK)
