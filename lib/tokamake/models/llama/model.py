"""Llama (arXiv 2302.13971): RMSNorm, rotary positions, grouped attention, SwiGLU.

Weights come from a checkpoint (`tokamake.checkpoint`), or `common.random_weights` draws them. The
trainer, evaluation and generation call the model for logits.
Shape suffixes: B batch, L tokens, D hidden size.
"""

from torch import Tensor

from tokamake.models.common.key_value_cache import KeyValueCache
from tokamake.models.common.language_model import LanguageModel
from tokamake.models.common.layers import Attention, GatedMLP, TransformerLayer
from tokamake.models.common.positions import rotary
from tokamake.parallel.tensor import RMSNorm

SETTINGS = {
    "position_embedding": ("rotary",),
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "hidden_act": ("silu",),
    "attention_bias": (False, True),
    "mlp_bias": (False, True),
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": (False, True),
}
"""Fields of `Architecture` that this family knows: choices, the default first, or a default."""

INTERMEDIATE_SIZE = (8, 3, 256)
"""Width of the MLP by default: 8/3 of hidden_size, rounded up to a multiple of 256."""


class Model(LanguageModel):
    """A Llama; its parameters have Hugging Face's names, see `tensor_name`."""

    def build_norm(self) -> RMSNorm:
        hidden, eps = self.architecture.hidden_size, self.architecture.rms_norm_eps
        return RMSNorm(hidden, self.mesh, eps=eps)

    def build_layer(self) -> TransformerLayer:
        attention = Attention(self.architecture, self.mesh)
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
