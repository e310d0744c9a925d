"""Qwen3, dense (arXiv 2505.09388): a Llama whose query and key heads are normed before rotation.

The norms of heads (QK-norm) keep training stable; Qwen2's biases are gone. head_dim is free of
hidden_size / num_attention_heads. Sliding windows are not supported.
"""

from functools import partial

from torch import nn

from tokamake.models.common.decoder import Decoder
from tokamake.models.common.layers import Attention
from tokamake.parallel.mesh import SINGLE_RANK, Mesh
from tokamake.parallel.placement import Placement

SETTINGS = {
    "position_embedding": ("rotary",),
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "hidden_act": ("silu",),
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": (False, True),
}


class HeadRMSNorm(nn.RMSNorm):
    """Root-mean-square norm of each attention head; the ranks divide the heads."""

    def __init__(self, width: int, mesh: Mesh = SINGLE_RANK, *, eps: float) -> None:
        super().__init__(width, eps=eps)
        self.placements = {"weight": Placement(partial=mesh.tensor.size > 1)}


class Model(Decoder):
    """A Qwen3; its parameters have Hugging Face's names, see `tensor_name`."""

    is_gated = True

    def build_attention(self) -> Attention:
        head_dim, eps = self.architecture.head_dim, self.architecture.rms_norm_eps
        head_norm = partial(HeadRMSNorm, head_dim, self.mesh, eps=eps)
        return Attention(self.architecture, self.mesh, head_norm=head_norm)
