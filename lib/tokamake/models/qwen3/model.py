"""Qwen3, dense (arXiv 2505.09388): a Llama whose query and key heads are normed before rotation.

The norms of heads (QK-norm) keep training stable; Qwen2's biases are gone. head_dim is free of
hidden_size / num_attention_heads. Sliding windows are not supported.
Shape suffixes: B batch, L tokens, D hidden size.
"""

from functools import partial

from torch import Tensor, nn

from tokamake.models.common.key_value_cache import KeyValueCache
from tokamake.models.common.language_model import LanguageModel
from tokamake.models.common.layers import Attention, GatedMLP, TransformerLayer
from tokamake.models.common.positions import rotary
from tokamake.parallel.mesh import SINGLE_RANK, Mesh
from tokamake.parallel.tensor import Placement, RMSNorm

SETTINGS = {
    "position_embedding": ("rotary",),
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "hidden_act": ("silu",),
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": (False, True),
}
"""Fields of `Architecture` that this family knows: choices, the default first, or a default."""


class HeadRMSNorm(nn.RMSNorm):
    """Root-mean-square norm of each attention head; the ranks divide the heads."""

    def __init__(self, width: int, mesh: Mesh = SINGLE_RANK, *, eps: float) -> None:
        super().__init__(width, eps=eps)
        self.placements = {"weight": Placement(partial=mesh.tensor.size > 1)}


class Model(LanguageModel):
    """A Qwen3; its parameters have Hugging Face's names, see `tensor_name`."""

    def build_norm(self) -> RMSNorm:
        hidden, eps = self.architecture.hidden_size, self.architecture.rms_norm_eps
        return RMSNorm(hidden, self.mesh, eps=eps)

    def build_layer(self) -> TransformerLayer:
        head_dim, eps = self.architecture.head_dim, self.architecture.rms_norm_eps
        head_norm = partial(HeadRMSNorm, head_dim, self.mesh, eps=eps)
        attention = Attention(self.architecture, self.mesh, head_norm=head_norm)
        return TransformerLayer(
            self.build_norm, attention, mlp=GatedMLP(self.architecture, self.mesh)
        )

    def forward(
        self,
        x: Tensor,
        cache: KeyValueCache | None = None,
        *,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        sample_numbers: Tensor | None = None,
    ) -> Tensor:
        """Predict each token's successor; see `LanguageModel.forward`."""
        if position_ids is None:
            position_ids = self.positions(x, cache)
        dropout = self.dropout(x, sample_numbers)
        x_BLD = self.embed_tokens(x) if self.is_first else x
        if self.is_first and dropout:
            x_BLD = dropout.states(x_BLD, "embedding")
        cos, sin = rotary(position_ids, self.architecture, x_BLD.dtype)
        mask = self.mask(document_ids, cache)
        x_BLD = self.through_layers(x_BLD, cos, sin, mask, dropout, cache=cache)
        return self.logits(x_BLD, cache) if self.is_last else x_BLD
