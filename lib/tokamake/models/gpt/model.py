"""GPT (GPT-2, GPT-3, StarCoder, Bloom): LayerNorm, an MLP without a gate, biases; positions are
learned, ALiBi or rotary.

Weights come from a checkpoint (`tokamake.checkpoint`), or `common.random_weights` draws them. The
trainer, evaluation and generation call the model for logits.
Shape suffixes: B batch, L tokens, D hidden size.
"""

from torch import Tensor

from tokamake.models.common.decoder import Decoder
from tokamake.models.common.key_value_cache import KeyValueCache
from tokamake.models.common.positions import alibi
from tokamake.parallel.attention import AttentionMask
from tokamake.parallel.axis import part
from tokamake.parallel.document_mask import PackedDocuments

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

INTERMEDIATE_SIZE = (4, 1, 1)


class Model(Decoder):
    """A GPT whose parameters have the names of Hugging Face's Llama, see `tensor_name`."""

    def add_embeddings(self) -> None:
        """Add the embeddings of tokens and of learned positions, and their norm."""
        super().add_embeddings()
        if self.architecture.embedding_layernorm:
            self.embed_layernorm = self.build_norm()

    def embedded(self, tokens_BL: Tensor, positions: Tensor) -> Tensor:
        x_BLD = super().embedded(tokens_BL, positions)
        return self.embed_layernorm(x_BLD) if hasattr(self, "embed_layernorm") else x_BLD

    def biased(
        self, mask: AttentionMask, x_BLD: Tensor, *, places: Tensor, cache: KeyValueCache | None
    ) -> AttentionMask:
        """ALiBi's bias of scores, if the model has it, else the mask."""
        if self.architecture.position_embedding != "alibi":
            return mask
        mask = mask.mask if isinstance(mask, PackedDocuments) else mask
        assert mask is None or isinstance(mask, Tensor)
        total = cache.this_pass.span if cache else len(places)
        num_heads = self.architecture.num_attention_heads
        heads = part(num_heads, self.mesh.tensor)
        return alibi(num_heads, heads, positions=places, total=total, like=x_BLD, mask=mask)
