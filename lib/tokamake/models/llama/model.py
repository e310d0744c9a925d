"""Llama (arXiv 2302.13971): RMSNorm, rotary positions, grouped attention, SwiGLU.

Weights come from a checkpoint (`tokamake.checkpoint`) or from `Model.initialize`; the trainer,
evaluation and generation call the model for logits.
Shape suffixes: B batch, L tokens, D hidden size, V vocabulary, K width of a head.
"""

from functools import partial

from torch import Tensor

from tokamake.config.architecture import Architecture
from tokamake.models.common.language_model import LanguageModel
from tokamake.models.common.layers import Attention, GatedMLP, KeyValueCache, TransformerLayer
from tokamake.models.common.positions import rotary
from tokamake.parallel.mesh import ALONE, Mesh
from tokamake.parallel.tensor import (
    ColumnParallelLinear,
    RMSNorm,
    VocabParallelEmbedding,
)

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


def _block(architecture: Architecture, mesh: Mesh) -> TransformerLayer:
    norm = partial(RMSNorm, architecture.hidden_size, mesh, eps=architecture.rms_norm_eps)
    return TransformerLayer(norm, Attention(architecture, mesh), GatedMLP(architecture, mesh))


class Model(LanguageModel):
    """A Llama whose parameters are named as Hugging Face's, see `tensor_name`.

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
        if self.is_first:
            self.embed_tokens = VocabParallelEmbedding(vocabulary, hidden, mesh)
        if self.is_last:
            self.norm = RMSNorm(hidden, mesh, eps=architecture.rms_norm_eps)
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
        if position_ids is None:
            position_ids = self.positions(x, start=cache[0].length if cache else 0)
        x_BLD = self.embed_tokens(x) if self.is_first else x
        angles = rotary(position_ids, self.architecture)
        cos, sin = (angle.to(x_BLD.dtype) for angle in angles)
        seen = self.mask(document_ids)
        x_BLD = self.through_layers(x_BLD, cos, sin, seen, cache=cache)
        return self.logits(x_BLD) if self.is_last else x_BLD
