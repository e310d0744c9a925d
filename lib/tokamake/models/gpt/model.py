"""GPT (GPT-2, GPT-3, StarCoder, Bloom): LayerNorm, an MLP that does not gate, biases, and positions
that are learned, or ALiBi's, or rotary.

Weights come from a checkpoint (`tokamake.checkpoint`) or from `Model.initialize`; the trainer,
evaluation and generation call the model for logits.
Shape suffixes: B batch, L tokens, S tokens attended to, D hidden size, V vocabulary, H query heads
of this rank, K width of a head.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from tokamake.config.architecture import Architecture
from tokamake.models.common.language_model import LanguageModel
from tokamake.models.common.layers import Attention, KeyValueCache, TransformerLayer
from tokamake.models.common.positions import alibi, rotary
from tokamake.parallel.attention import Seen
from tokamake.parallel.axis import part
from tokamake.parallel.context import PackedDocuments
from tokamake.parallel.mesh import ALONE, Mesh
from tokamake.parallel.tensor import (
    ColumnParallelLinear,
    LayerNorm,
    PositionEmbedding,
    RowParallelLinear,
    VocabParallelEmbedding,
    own_tokens,
    shared_input,
)

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

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


class MLP(nn.Module):
    """Feed-forward layer."""

    def __init__(self, architecture: Architecture, mesh: Mesh = ALONE) -> None:
        super().__init__()
        self._mesh, self._activation = mesh, _ACTIVATIONS[architecture.hidden_act]
        hidden, inner = architecture.hidden_size, architecture.intermediate_size
        self.up_proj = ColumnParallelLinear(hidden, inner, mesh, bias=architecture.mlp_bias)
        self.down_proj = RowParallelLinear(inner, hidden, mesh, bias=architecture.mlp_bias)

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Transform each token by itself."""
        x_BLD = shared_input(x_BLD, self._mesh)
        return self.down_proj(self._activation(self.up_proj(x_BLD)))


def _block(architecture: Architecture, mesh: Mesh) -> TransformerLayer:
    norm = partial(LayerNorm, architecture.hidden_size, mesh, eps=architecture.layer_norm_epsilon)
    return TransformerLayer(norm, Attention(architecture, mesh), MLP(architecture, mesh))


class Model(LanguageModel):
    """A GPT whose parameters are named as those of Llama, see `tensor_name`.

    Args:
        architecture: shape of the model; its vocab_size is filled in.
        mesh: this rank among its peers.
        stage: numbers of the layers of this stage of the pipeline; None: all.
    """

    into_residual = ("o_proj.weight", "down_proj.weight")

    def __init__(
        self, architecture: Architecture, mesh: Mesh = ALONE, stage: range | None = None
    ) -> None:
        super().__init__(architecture, mesh, stage, _block)
        vocabulary, hidden = architecture.vocab_size, architecture.hidden_size
        assert vocabulary is not None
        norm = partial(LayerNorm, hidden, mesh, eps=architecture.layer_norm_epsilon)
        if self.is_first:
            self.embed_tokens = VocabParallelEmbedding(vocabulary, hidden, mesh)
        if self.is_first and architecture.position_embedding == "learned":
            longest = architecture.max_position_embeddings
            self.embed_positions = PositionEmbedding(longest, hidden, mesh)
        if self.is_first and architecture.embedding_layernorm:
            self.embed_layernorm = norm()
        if self.is_last:
            self.norm = norm()
        if self.is_last and (self.has_copy or not architecture.tie_word_embeddings):
            self.lm_head = ColumnParallelLinear(hidden, vocabulary, mesh)

    def forward(
        self,
        x: Tensor,
        cache: list[KeyValueCache] | None = None,
        *,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
    ) -> Tensor:
        """Predict each token's successor.

        Args:
            x: (B, L) int64 token ids; of a later stage, (B, L, D) states.
            cache: tokens already seen, from `new_cache`; it is extended by these.
            position_ids: (B, L) positions, or (L,) of all rows; None: those in the row.
            document_ids: (B, L) documents, where a token sees none but those of its own.

        Returns:
            (B, L, V) logits in the dtype of the weights; of an earlier stage, (B, L, D) states.
        """
        past, kind = cache[0].length if cache else 0, self.architecture.position_embedding
        own = self.positions(x, start=past)
        position_ids = own if position_ids is None else position_ids
        x_BLD = self._embedded(x, position_ids) if self.is_first else x
        cos, sin = None, None
        seen: Seen = self.mask(document_ids)
        if kind == "rotary":
            angles = rotary(position_ids, self.architecture)
            cos, sin = (angle.to(x_BLD.dtype) for angle in angles)
        if kind == "alibi":
            assert seen is None or isinstance(seen, PackedDocuments)
            seen = self._bias(x_BLD, past, len(own), seen.mask if seen else None)
        x_BLD = self.through_layers(x_BLD, cos, sin, seen, cache=cache)
        return self.logits(x_BLD) if self.is_last else x_BLD

    def _embedded(self, tokens_BL: Tensor, positions: Tensor) -> Tensor:
        x_BLD: Tensor = self.embed_tokens(tokens_BL)
        if hasattr(self, "embed_positions"):
            by_row = positions if positions.dim() > 1 else positions[None]
            x_BLD = x_BLD + self.embed_positions(own_tokens(by_row, self.mesh))
        return self.embed_layernorm(x_BLD) if hasattr(self, "embed_layernorm") else x_BLD

    def _bias(self, like: Tensor, past: int, length: int, seen: Tensor | None) -> Tensor:
        heads = self.architecture.num_attention_heads
        total, own = past + length, part(heads, self.mesh.tensor)
        return alibi(heads, own, length=length, total=total, like=like, seen=seen)
