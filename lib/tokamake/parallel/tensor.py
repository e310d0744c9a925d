"""Layers shared by tensor-parallel ranks: drop-ins that are torch's own where a rank is alone.

A model builds them with its mesh and calls them as on one device; weights are plain local tensors,
parts of the whole ones as `placements` tells. Megatron-LM, arXiv 1909.08053; sequence parallelism,
arXiv 2205.05198. Shape suffixes: B batch, L tokens, D width in, E width out, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tokamake.parallel.axis import Axis, part
from tokamake.parallel.collectives import add, copy, gather, scatter_sum
from tokamake.parallel.linear import linear
from tokamake.parallel.mesh import ALONE, Mesh

_SEQUENCE = 1
"""Dimension of x_BLD that sequence parallelism shares."""


@dataclass(frozen=True)
class Placement:
    """How tensor-parallel ranks hold a parameter."""

    dim: int | None = None
    """Dimension along which each has a part, as `torch.chunk` cuts it; None: all have all of it."""
    partial: bool = False
    """Whether each rank has a part of the gradient only, so that they must be summed."""


def placements(model: nn.Module) -> dict[str, Placement]:
    """How each parameter of a model is held; to be asked before anything wraps the model."""
    found = {}
    for prefix, module in model.named_modules():
        of_module = getattr(module, "placements", {})
        for name, _ in module.named_parameters(recurse=False):
            full = f"{prefix}.{name}" if prefix else name
            found[full] = of_module.get(name, Placement())
    return found


def shared_input(x_BLD: Tensor, mesh: Mesh) -> Tensor:
    """What column-parallel layers take: whole sequences, whose gradients add up over ranks."""
    if mesh.sequence_parallel:
        return gather(x_BLD, mesh.tensor, dim=_SEQUENCE)
    return copy(x_BLD, mesh.tensor)


def summed_output(y_BLE: Tensor, mesh: Mesh) -> Tensor:
    """What the ranks' partial results add up to; under sequence parallelism, a part of it."""
    if mesh.sequence_parallel:
        return scatter_sum(y_BLE, mesh.tensor, dim=_SEQUENCE)
    return add(y_BLE, mesh.tensor)


class ColumnParallelLinear(nn.Linear):
    """A linear layer of which each rank has a part of the outputs; feed it `shared_input`.

    Args:
        in_features: D.
        out_features: E of all ranks.
        mesh: this rank among its peers.
        bias: whether there is one.
    """

    def __init__(
        self, in_features: int, out_features: int, mesh: Mesh = ALONE, *, bias: bool = False
    ) -> None:
        super().__init__(in_features, len(part(out_features, mesh.tensor)), bias=bias)
        if mesh.tensor.size > 1:
            self.placements = {"weight": Placement(0), "bias": Placement(0)}

    def forward(self, input: Tensor) -> Tensor:
        """(B, L, D) to (B, L, E of this rank)."""
        return linear(input, self.weight, self.bias)


class RowParallelLinear(nn.Linear):
    """A linear layer of which each rank has a part of the inputs; its results are summed.

    Args:
        in_features: D of all ranks.
        out_features: E.
        mesh: this rank among its peers.
        bias: whether there is one, added once.
    """

    def __init__(
        self, in_features: int, out_features: int, mesh: Mesh = ALONE, *, bias: bool = False
    ) -> None:
        super().__init__(len(part(in_features, mesh.tensor)), out_features, bias=bias)
        self._mesh = mesh
        if mesh.tensor.size > 1:
            whole = Placement(partial=mesh.sequence_parallel)
            self.placements = {"weight": Placement(1), "bias": whole}

    def forward(self, input: Tensor) -> Tensor:
        """(B, L, D of this rank) to (B, L, E); under sequence parallelism to (B, L of it, E)."""
        if self._mesh.tensor.size == 1:
            return linear(input, self.weight, self.bias)
        y_BLE = summed_output(linear(input, self.weight), self._mesh)
        return y_BLE if self.bias is None else y_BLE + self.bias


class ReplicatedLinear(nn.Linear):
    """A linear layer that all ranks have whole, each using a part of the outputs.

    Of the gradients each rank has what comes from its use; feed it `shared_input`.

    Args:
        in_features: D.
        out_features: E of the whole.
        mesh: this rank among its peers.
        rows: outputs that this rank uses.
        bias: whether there is one.
    """

    def __init__(
        self, in_features: int, out_features: int, mesh: Mesh, *, rows: range, bias: bool = False
    ) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self._rows = slice(rows.start, rows.stop)
        if mesh.tensor.size > 1:
            self.placements = {name: Placement(partial=True) for name in ("weight", "bias")}

    def forward(self, input: Tensor) -> Tensor:
        """(B, L, D) to (B, L, outputs of this rank)."""
        bias = None if self.bias is None else self.bias[self._rows]
        return linear(input, self.weight[self._rows], bias)


class VocabParallelEmbedding(nn.Embedding):
    """An embedding of which each rank has some rows.

    Args:
        num_embeddings: V of all ranks.
        embedding_dim: D.
        mesh: this rank among its peers.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, mesh: Mesh = ALONE) -> None:
        self._rows = part(num_embeddings, mesh.tensor)
        super().__init__(len(self._rows), embedding_dim)
        self._mesh = mesh
        if mesh.tensor.size > 1:
            self.placements = {"weight": Placement(0)}

    def forward(self, input: Tensor) -> Tensor:
        """Token ids (B, L) to (B, L, D); under sequence parallelism to this rank's tokens."""
        if self._mesh.tensor.size == 1:
            return super().forward(input)
        elsewhere = (input < self._rows.start) | (input >= self._rows.stop)
        rows = (input - self._rows.start).masked_fill(elsewhere, 0)
        if not self._rows:
            x_BLD = self.weight.new_zeros(*input.shape, self.embedding_dim) + self.weight.sum()
        else:
            x_BLD = F.embedding(rows, self.weight).masked_fill(elsewhere[..., None], 0)
        return summed_output(x_BLD, self._mesh)


class RMSNorm(nn.RMSNorm):
    """Root-mean-square norm (arXiv 1910.07467) of each token."""

    def __init__(self, width: int, mesh: Mesh = ALONE, *, eps: float) -> None:
        super().__init__(width, eps=eps)
        self.placements = {"weight": Placement(partial=mesh.sequence_parallel)}


class HeadRMSNorm(nn.RMSNorm):
    """Root-mean-square norm of each attention head; ranks have different heads."""

    def __init__(self, width: int, mesh: Mesh = ALONE, *, eps: float) -> None:
        super().__init__(width, eps=eps)
        self.placements = {"weight": Placement(partial=mesh.tensor.size > 1)}


class LayerNorm(nn.LayerNorm):
    """Layer norm (arXiv 1607.06450) of each token."""

    def __init__(self, width: int, mesh: Mesh = ALONE, *, eps: float) -> None:
        super().__init__(width, eps=eps)
        whole = Placement(partial=mesh.sequence_parallel)
        self.placements = {"weight": whole, "bias": whole}


class PositionEmbedding(nn.Embedding):
    """Learned positions, which all ranks have whole; under sequence parallelism each uses some."""

    def __init__(self, num_embeddings: int, embedding_dim: int, mesh: Mesh = ALONE) -> None:
        super().__init__(num_embeddings, embedding_dim)
        self.placements = {"weight": Placement(partial=mesh.sequence_parallel)}


def own_tokens(x: Tensor, mesh: Mesh) -> Tensor:
    """This rank's part of the sequence, dimension 1, where sequence parallelism shares it."""
    if not mesh.sequence_parallel:
        return x
    return x.chunk(mesh.tensor.size, dim=_SEQUENCE)[mesh.tensor.rank]


@torch.no_grad()
def cut(whole: Tensor, placement: Placement, axis: Axis) -> Tensor:
    """This rank's part of a whole parameter."""
    if placement.dim is None or axis.size == 1:
        return whole
    rows = part(whole.shape[placement.dim], axis)
    return whole.narrow(placement.dim, rows.start, len(rows))
