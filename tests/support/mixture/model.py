"""A Llama whose MLP is the sum of all experts, weighted by a router; experts are stacks.

Shape suffixes: B batch, L tokens, D hidden size, E experts, I width of an expert.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tokamake.config.architecture import Architecture
from tokamake.models.common.decoder import Decoder
from tokamake.parallel.axis import part
from tokamake.parallel.mesh import Mesh
from tokamake.parallel.placement import Placement
from tokamake.parallel.tensor import shared_input, summed_output

SETTINGS = {
    "position_embedding": ("rotary",),
    "rope_theta": 10000.0,
    "hidden_act": ("silu",),
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": (False, True),
    "num_experts": 3,
    "expert_size": 24,
}


class Stack(nn.Module):
    """A stack of matrices, (E, outputs, inputs), and perhaps of biases, (E, outputs)."""

    def __init__(self, *shape: int, dim: int | None, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))
        partial = Placement(partial=dim is not None, decays=False)
        self.placements = {"weight": Placement(dim, hidden=True), "bias": partial}
        self.bias = nn.Parameter(torch.empty(shape[:2])) if bias else None


class Experts(nn.Module):
    """Gated MLPs; tensor-parallel ranks divide their width."""

    def __init__(self, architecture: Architecture, mesh: Mesh) -> None:
        super().__init__()
        number, hidden = architecture.setting("num_experts"), architecture.hidden_size
        inner = len(part(architecture.setting("expert_size"), mesh.tensor))
        rows, columns = (1, 2) if mesh.tensor.size > 1 else (None, None)
        self.gate_proj = Stack(number, inner, hidden, dim=rows)
        self.up_proj = Stack(number, inner, hidden, dim=rows)
        self.down_proj = Stack(number, hidden, inner, dim=columns, bias=True)


class Mixture(nn.Module):
    """The experts of a layer, and their router."""

    def __init__(self, architecture: Architecture, mesh: Mesh) -> None:
        super().__init__()
        self._mesh = mesh
        self.gate = nn.Linear(
            architecture.hidden_size, architecture.setting("num_experts"), bias=False
        )
        self.gate.placements = {"weight": Placement(partial=mesh.tensor.size > 1)}  # type: ignore[assignment]
        self.experts = Experts(architecture, mesh)

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Transform each token on its own."""
        x_BLD = shared_input(x_BLD, self._mesh)
        shares_BLE = torch.softmax(self.gate(x_BLD), -1)
        experts = self.experts
        gate_BLEI = torch.einsum("bld,eid->blei", x_BLD, experts.gate_proj.weight)
        up_BLEI = torch.einsum("bld,eid->blei", x_BLD, experts.up_proj.weight)
        inner_BLEI = F.silu(gate_BLEI) * up_BLEI * shares_BLE[..., None]
        y_BLD = torch.einsum("blei,edi->bld", inner_BLEI, experts.down_proj.weight)
        assert experts.down_proj.bias is not None
        # Each rank adds its part of the bias: so all gradients of the router are partial.
        y_BLD = y_BLD + shares_BLE @ experts.down_proj.bias / self._mesh.tensor.size
        return summed_output(y_BLD, self._mesh)


class Model(Decoder):
    """A mixture of experts; its parameters have Hugging Face's names."""

    is_gated = True

    def build_mlp(self) -> Any:
        return Mixture(self.architecture, self.mesh)
