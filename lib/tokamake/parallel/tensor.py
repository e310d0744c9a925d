"""Tensor-parallel layers: drop-ins for torch's own, and equal to them on one rank.

A model builds them with its mesh and calls them as on one device. Weights are plain local tensors;
`placements` says which parts of the whole weights they are. Megatron-LM: arXiv 1909.08053; sequence
parallelism: arXiv 2205.05198. Shape suffixes: B batch, L tokens, D width in, E width out,
V vocabulary. Under sequence parallelism, L counts this rank's tokens outside these layers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tokamake.parallel.axis import part
from tokamake.parallel.collectives import add, copy, gather, scatter_sum
from tokamake.parallel.linear import linear
from tokamake.parallel.mesh import SINGLE_RANK, Mesh
from tokamake.parallel.placement import Placement

_SEQUENCE = 1
"""Dimension of x_BLD that sequence parallelism divides."""


def shared_input(x_BLD: Tensor, mesh: Mesh) -> Tensor:
    """Input of column-parallel layers: the whole sequence, (B, L of all ranks, D).

    The backward pass sums its gradient over the ranks.
    """
    if mesh.sequence_parallel:
        return gather(x_BLD, mesh.tensor, dim=_SEQUENCE)
    return copy(x_BLD, mesh.tensor)


def summed_output(y_BLE: Tensor, mesh: Mesh) -> Tensor:
    """Sum of the partial outputs, (B, L, E); under sequence parallelism, of this rank's tokens."""
    if mesh.sequence_parallel:
        return scatter_sum(y_BLE, mesh.tensor, dim=_SEQUENCE)
    return add(y_BLE, mesh.tensor)


class _LoadedLinear(nn.Linear):
    """A linear layer whose weights are loaded: on the device "meta", it draws none.

    There, the random functions of torch import its compiler, which takes long.
    """

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            super().reset_parameters()


class _LoadedEmbedding(nn.Embedding):
    """An embedding whose weights are loaded; see `_LoadedLinear`."""

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            super().reset_parameters()


class ColumnParallelLinear(_LoadedLinear):
    """A linear layer whose E outputs the ranks divide; its input is a `shared_input`."""

    def __init__(
        self, in_features: int, out_features: int, *, mesh: Mesh = SINGLE_RANK, bias: bool = False
    ) -> None:
        super().__init__(in_features, len(part(out_features, mesh.tensor)), bias=bias)
        if mesh.tensor.size > 1:
            self.placements = {"weight": Placement(0), "bias": Placement(0)}

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


class RowParallelLinear(_LoadedLinear):
    """A linear layer whose D inputs the ranks divide; it sums partial outputs, then adds bias."""

    def __init__(
        self, in_features: int, out_features: int, *, mesh: Mesh = SINGLE_RANK, bias: bool = False
    ) -> None:
        super().__init__(len(part(in_features, mesh.tensor)), out_features, bias=bias)
        self._mesh = mesh
        if mesh.tensor.size > 1:
            whole = Placement(partial=mesh.sequence_parallel)
            self.placements = {"weight": Placement(1), "bias": whole}

    def forward(self, input: Tensor) -> Tensor:
        """Map (B, L, D of this rank) to the `summed_output` (B, L, E)."""
        if self._mesh.tensor.size == 1:
            return linear(input, self.weight, self.bias)
        y_BLE = summed_output(linear(input, self.weight), self._mesh)
        # After the sum: each rank would add the bias once.
        return y_BLE if self.bias is None else y_BLE + self.bias


class ReplicatedLinear(_LoadedLinear):
    """A linear layer replicated on all ranks; each rank computes a part of the outputs.

    Its input is a `shared_input`. Gradients are partial.

    Args:
        out_features: E of all ranks together.
        rows: outputs that this rank computes; ranks may overlap.
    """

    def __init__(
        self, in_features: int, out_features: int, *, mesh: Mesh, rows: range, bias: bool = False
    ) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.rows = slice(rows.start, rows.stop)
        if mesh.tensor.size > 1:
            self.placements = {name: Placement(partial=True) for name in ("weight", "bias")}

    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias[self.rows]
        return linear(input, self.weight[self.rows], bias)


class WholeLinear(_LoadedLinear):
    """A linear layer that every rank has whole; `partial`: gradients must be summed."""

    def __init__(
        self, in_features: int, out_features: int, *, partial: bool = False, bias: bool = True
    ) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.placements = {name: Placement(partial=partial) for name in ("weight", "bias")}

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


class JoinedLinear(nn.Module):
    """Linear layers of the same input as one product, for inference; weights are copied.

    For a few tokens, a product takes as long as its start.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        rows = [getattr(layer, "rows", slice(None)) for layer in layers]
        weights = [layer.weight[own] for layer, own in zip(layers, rows, strict=True)]
        biases = [
            layer.bias[own]
            for layer, own in zip(layers, rows, strict=True)
            if layer.bias is not None
        ]
        self.weight = nn.Parameter(torch.cat(weights), requires_grad=False)
        self.bias = nn.Parameter(torch.cat(biases), requires_grad=False) if biases else None
        self._sizes = [len(weight) for weight in weights]

    def forward(self, input: Tensor) -> tuple[Tensor, ...]:
        return linear(input, self.weight, self.bias).split(self._sizes, -1)


class VocabParallelEmbedding(_LoadedEmbedding):
    """An embedding whose V entries the ranks divide."""

    def __init__(
        self, num_embeddings: int, embedding_dim: int, *, mesh: Mesh = SINGLE_RANK
    ) -> None:
        self._rows = part(num_embeddings, mesh.tensor)
        super().__init__(len(self._rows), embedding_dim)
        self._mesh = mesh
        if mesh.tensor.size > 1:
            self.placements = {"weight": Placement(0)}

    def forward(self, input: Tensor) -> Tensor:
        """Map int64 token ids (B, L) of the whole sequence to the `summed_output` (B, L, D)."""
        if self._mesh.tensor.size == 1:
            return super().forward(input)
        elsewhere = (input < self._rows.start) | (input >= self._rows.stop)
        rows = (input - self._rows.start).masked_fill(elsewhere, 0)
        if not self._rows:
            # The weight is empty; its sum, 0, keeps it part of the backward pass.
            x_BLD = self.weight.new_zeros(*input.shape, self.embedding_dim) + self.weight.sum()
        else:
            x_BLD = F.embedding(rows, self.weight).masked_fill(elsewhere[..., None], 0)
        return summed_output(x_BLD, self._mesh)


class RMSNorm(nn.RMSNorm):
    """Root-mean-square norm (arXiv 1910.07467) of each token."""

    def __init__(self, width: int, mesh: Mesh = SINGLE_RANK, *, eps: float) -> None:
        super().__init__(width, eps=eps)
        # Under sequence parallelism a rank sees a part of the tokens: its gradient is partial.
        self.placements = {"weight": Placement(partial=mesh.sequence_parallel)}


class CenteredNorm(nn.RMSNorm):
    """A mixin of RMSNorms: the factor is 1 + weight, in fp32, and weights start at 0 (Gemma)."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        factor = 1 + self.weight.float()
        return F.rms_norm(x.float(), factor.shape, factor, self.eps).to(x.dtype)


class CenteredRMSNorm(CenteredNorm, RMSNorm):
    """`RMSNorm` whose factor is 1 + weight."""


class LayerNorm(nn.LayerNorm):
    """Layer norm (arXiv 1607.06450) of each token."""

    def __init__(self, width: int, mesh: Mesh = SINGLE_RANK, *, eps: float) -> None:
        super().__init__(width, eps=eps)
        whole = Placement(partial=mesh.sequence_parallel)
        self.placements = {"weight": whole, "bias": whole}


class ReplicatedEmbedding(_LoadedEmbedding):
    """An embedding that all ranks have whole, such as a table of positions.

    Sequence parallelism makes its gradients partial.
    """

    def __init__(
        self, num_embeddings: int, embedding_dim: int, *, mesh: Mesh = SINGLE_RANK
    ) -> None:
        super().__init__(num_embeddings, embedding_dim)
        self.placements = {"weight": Placement(partial=mesh.sequence_parallel)}


def own_tokens(x: Tensor, mesh: Mesh) -> Tensor:
    """This rank's tokens (dimension 1) of a whole sequence; without sequence parallelism, all."""
    if not mesh.sequence_parallel:
        return x
    return x.chunk(mesh.tensor.size, dim=_SEQUENCE)[mesh.tensor.rank]


def first_tokens(x_BLD: Tensor, mesh: Mesh, places: Tensor | None = None) -> Tensor:
    """States of the first token of each sample, (samples, D), on all ranks.

    Args:
        x_BLD: of this rank's `own_tokens`. Every rank has the whole gradient of the result; under
            sequence parallelism, the gradient of the states stays on the rank that has the token.
        places: (samples,) int64 flat index of the tokens in the grid of the rows; None: each row
            is a sample.
    """
    num_rows, length, _ = x_BLD.shape
    if places is None:
        num_own = length * (mesh.tensor.size if mesh.sequence_parallel else 1)
        places = torch.arange(num_rows, device=x_BLD.device) * num_own
    if not mesh.sequence_parallel:
        return x_BLD.flatten(0, 1).index_select(0, places)
    row, column = places // (length * mesh.tensor.size), places % (length * mesh.tensor.size)
    column = column - length * mesh.tensor.rank
    is_own = (column >= 0) & (column < length)
    own_places = row * length + column.clamp(0, length - 1)
    return add(x_BLD.flatten(0, 1).index_select(0, own_places) * is_own[:, None], mesh.tensor)
