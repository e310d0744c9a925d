"""Qwen3, dense (arXiv 2505.09388): a Llama whose query and key heads are normed before rotation.

The norms of heads (QK-norm) keep training stable; Qwen2's biases are gone. head_dim is free of
hidden_size / num_attention_heads. Sliding windows are not supported.
Shape suffixes: B batch, L tokens, D hidden size.
"""

from functools import partial

from torch import Tensor

from tokamake.config.architecture import Architecture
from tokamake.models.common.language_model import LanguageModel
from tokamake.models.common.layers import Attention, GatedMLP, KeyValueCache, TransformerLayer
from tokamake.models.common.positions import rotary
from tokamake.parallel.mesh import ALONE, Mesh
from tokamake.parallel.tensor import HeadRMSNorm, RMSNorm

SETTINGS = {
    "position_embedding": ("rotary",),
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "hidden_act": ("silu",),
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": (False, True),
}
"""Fields of `Architecture` that this family knows: choices, the default first, or a default."""


def _layer(architecture: Architecture, mesh: Mesh) -> TransformerLayer:
    eps = architecture.rms_norm_eps
    norm = partial(RMSNorm, architecture.hidden_size, mesh, eps=eps)
    head_norm = partial(HeadRMSNorm, architecture.head_dim, mesh, eps=eps)
    attention = Attention(architecture, mesh, head_norm)
    return TransformerLayer(norm, attention, GatedMLP(architecture, mesh))


class Model(LanguageModel):
    """A Qwen3; its parameters have Hugging Face's names, see `tensor_name`.

    Args:
        architecture: shape of the model, vocab_size filled in.
        mesh: this rank among its peers.
        stage: numbers of the layers of this pipeline stage; None: all.
    """

    into_residual = ("o_proj.weight", "down_proj.weight")

    def __init__(
        self, architecture: Architecture, mesh: Mesh = ALONE, stage: range | None = None
    ) -> None:
        super().__init__(architecture, mesh, stage, _layer)
        self.add_embedding()
        norm = partial(RMSNorm, architecture.hidden_size, mesh, eps=architecture.rms_norm_eps)
        self.add_output(norm)

    def forward(
        self,
        x: Tensor,
        cache: list[KeyValueCache] | None = None,
        *,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
    ) -> Tensor:
        """Predict each token's successor; see `LanguageModel.forward`."""
        if position_ids is None:
            position_ids = self.positions(x, start=cache[0].length if cache else 0)
        x_BLD = self.embed_tokens(x) if self.is_first else x
        cos, sin = (angle.to(x_BLD.dtype) for angle in rotary(position_ids, self.architecture))
        x_BLD = self.through_layers(x_BLD, cos, sin, self.mask(document_ids), cache=cache)
        return self.logits(x_BLD) if self.is_last else x_BLD
