"""GPT (GPT-2, GPT-3, StarCoder, Bloom): LayerNorm, an MLP without a gate, biases; positions are
learned, ALiBi or rotary.

Weights come from a checkpoint (`tokamake.checkpoint`), or `common.random_weights` draws them. The
trainer, evaluation and generation call the model for logits.
Shape suffixes: B batch, L tokens, D hidden size.
"""

from torch import Tensor

from tokamake.models.common.key_value_cache import KeyValueCache
from tokamake.models.common.language_model import LanguageModel
from tokamake.models.common.layers import MLP, Attention, TransformerLayer
from tokamake.models.common.positions import alibi, rotary
from tokamake.parallel.attention import AttentionMask
from tokamake.parallel.axis import part
from tokamake.parallel.context import PackedDocuments
from tokamake.parallel.tensor import LayerNorm, ReplicatedEmbedding, own_tokens

SETTINGS = {
    "position_embedding": ("learned", "alibi", "rotary"),
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "hidden_act": ("gelu_new", "gelu", "gelu_pytorch_tanh", "relu"),
    "attention_bias": (True, False),
    "mlp_bias": (True, False),
    "layer_norm_epsilon": 1e-5,
    "embedding_layernorm": (False, True),
    "tie_word_embeddings": (True, False),
}
"""Fields of `Architecture` that this family knows: choices, the default first, or a default."""

INTERMEDIATE_SIZE = (4, 1, 1)
"""Width of the MLP by default: 4 times hidden_size."""


class Model(LanguageModel):
    """A GPT whose parameters have the names of Hugging Face's Llama, see `tensor_name`."""

    def build_norm(self) -> LayerNorm:
        hidden, eps = self.architecture.hidden_size, self.architecture.layer_norm_epsilon
        return LayerNorm(hidden, self.mesh, eps=eps)

    def build_layer(self) -> TransformerLayer:
        attention = Attention(self.architecture, self.mesh)
        return TransformerLayer(self.build_norm, attention, mlp=MLP(self.architecture, self.mesh))

    def add_embeddings(self) -> None:
        """Add the embeddings of tokens and of learned positions, and their norm."""
        super().add_embeddings()
        architecture = self.architecture
        if architecture.position_embedding == "learned":
            longest, hidden = architecture.max_position_embeddings, architecture.hidden_size
            self.embed_positions = ReplicatedEmbedding(longest, hidden, mesh=self.mesh)
        if architecture.embedding_layernorm:
            self.embed_layernorm = self.build_norm()

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
        x_BLD = self._embedded(x, position_ids) if self.is_first else x
        if self.is_first and dropout:
            x_BLD = dropout.states(x_BLD, "embedding")
        cos, sin = None, None
        mask: AttentionMask = self.mask(document_ids, cache)
        if self.architecture.position_embedding == "rotary":
            cos, sin = rotary(position_ids, self.architecture, x_BLD.dtype)
        if self.architecture.position_embedding == "alibi":
            mask = mask.mask if isinstance(mask, PackedDocuments) else mask
            assert mask is None or isinstance(mask, Tensor)
            places = self.positions(x, cache)  # in the row; position_ids can be those in a document
            total = cache.this_pass.span if cache else len(places)
            mask = self._bias(x_BLD, places, total=total, mask=mask)
        x_BLD = self.through_layers(x_BLD, cos, sin, mask, dropout, cache=cache)
        return self.logits(x_BLD, cache) if self.is_last else x_BLD

    def _embedded(self, tokens_BL: Tensor, positions: Tensor) -> Tensor:
        x_BLD: Tensor = self.embed_tokens(tokens_BL)
        if hasattr(self, "embed_positions"):
            positions_BL = positions if positions.dim() > 1 else positions[None]
            x_BLD = x_BLD + self.embed_positions(own_tokens(positions_BL, self.mesh))
        return self.embed_layernorm(x_BLD) if hasattr(self, "embed_layernorm") else x_BLD

    def _bias(self, like: Tensor, places: Tensor, *, total: int, mask: Tensor | None) -> Tensor:
        num_heads = self.architecture.num_attention_heads
        heads = part(num_heads, self.mesh.tensor)
        return alibi(num_heads, heads, positions=places, total=total, like=like, mask=mask)
