"""Llama (arXiv 2302.13971): RMSNorm, rotary positions, grouped attention, SwiGLU.

Weights come from a checkpoint (`tokamake.checkpoint`) or from `Model.initialize`. The trainer,
evaluation and generation call the model for logits.
Shape suffixes: B batch, L tokens, D hidden size.
"""

from functools import partial

from torch import Tensor

from tokamake.config.architecture import Architecture
from tokamake.models.common.language_model import LanguageModel
from tokamake.models.common.layers import Attention, GatedMLP, KeyValueCache, TransformerLayer
from tokamake.models.common.positions import rotary
from tokamake.parallel.mesh import ALONE, Mesh
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


def _layer(architecture: Architecture, mesh: Mesh) -> TransformerLayer:
    norm = partial(RMSNorm, architecture.hidden_size, mesh, eps=architecture.rms_norm_eps)
    return TransformerLayer(norm, Attention(architecture, mesh), GatedMLP(architecture, mesh))


class Model(LanguageModel):
    """A Llama; its parameters have Hugging Face's names, see `tensor_name`.

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
        # Angles are fp32: positions beyond 256 are not exact in bf16.
        cos, sin = (angle.to(x_BLD.dtype) for angle in rotary(position_ids, self.architecture))
        x_BLD = self.through_layers(x_BLD, cos, sin, self.mask(document_ids), cache=cache)
        return self.logits(x_BLD) if self.is_last else x_BLD
