"""T5 v1.1 (arXiv 1910.10683, 2002.05202) as transformers has it: an encoder-decoder with RMSNorm
before attention and MLP, a gated MLP, no biases, and positions as biases of attention.

A bias depends on the head and on the distance of two tokens, in buckets that grow with it. All
layers of a stack share its biases. Scores of attention are not divided by the root of the width of
a head. Megatron's T5 is another model, `t5`.
Shape suffixes: B batch, L tokens, D hidden size, V vocabulary, H heads.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tokamake.config.architecture import Architecture
from tokamake.models.common.encoder_decoder import CrossAttention, EncoderDecoder
from tokamake.models.common.layers import Attention
from tokamake.parallel.axis import part
from tokamake.parallel.mesh import SINGLE_RANK, Mesh
from tokamake.parallel.placement import Placement

STACKS = "encoder_decoder"

SETTINGS = {
    "position_embedding": ("relative",),
    "hidden_act": ("gelu_new", "silu"),
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": (False, True),
    "num_decoder_layers": 0,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
}
"""Its own: num_decoder_layers is the number of layers of the decoder, 0 for as many as the encoder
has, which num_hidden_layers counts. relative_attention_num_buckets is the number of biases of a
head, relative_attention_max_distance the tokens from which on all distances share a bucket."""


class RelativePositions(nn.Module):
    """Biases of attention scores of this rank's heads; an encoder has buckets for later tokens."""

    def __init__(
        self, architecture: Architecture, mesh: Mesh = SINGLE_RANK, *, both_directions: bool
    ) -> None:
        super().__init__()
        self._both_directions = both_directions
        self._num_buckets: int = architecture.setting("relative_attention_num_buckets")
        self._max_distance: int = architecture.setting("relative_attention_max_distance")
        num_heads = len(part(architecture.num_attention_heads, mesh.tensor))
        self.weight = nn.Parameter(torch.zeros(self._num_buckets, num_heads))
        if mesh.tensor.size > 1:
            self.placements = {"weight": Placement(1)}

    def forward(self, length: int) -> Tensor:
        """Return biases (1, H, L, L) of queries and keys."""
        places_L = torch.arange(length, device=self.weight.device)
        buckets_LL = self._buckets(places_L - places_L[:, None])
        return F.embedding(buckets_LL, self.weight).permute(2, 0, 1)[None]

    def _buckets(self, offsets_LL: Tensor) -> Tensor:
        """Bucket of each offset from the query to the key."""
        size, first = self._num_buckets, torch.zeros_like(offsets_LL)
        if self._both_directions:
            size //= 2
            first = size * (offsets_LL > 0)
            distances_LL = offsets_LL.abs()
        else:
            distances_LL = (-offsets_LL).clamp(min=0)
        # Half of the buckets hold one distance each, the other half growing ranges.
        exact = size // 2
        logarithm = (distances_LL.float() / exact).log() / math.log(self._max_distance / exact)
        ranges_LL = (exact + (logarithm * (size - exact)).long()).clamp(max=size - 1)
        return first + distances_LL.where(distances_LL < exact, ranges_LL)


class _Unscaled(nn.Module):
    """Queries whose scores keep their size when attention divides them by √width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self._factor = math.sqrt(width)

    def forward(self, x: Tensor) -> Tensor:
        return x * self._factor


class Model(EncoderDecoder):
    """A T5; layers of its stacks have the names of Hugging Face's Llama, see `tensor_name`."""

    is_gated = True

    def build_attention(self) -> Attention:
        attention = super().build_attention()
        attention.q_norm = _Unscaled(self.architecture.head_dim)
        return attention

    def build_cross_attention(self) -> CrossAttention:
        attention = super().build_cross_attention()
        attention.q_norm = _Unscaled(self.architecture.head_dim)
        return attention

    def add_embeddings(self) -> None:
        """Add the embedding of tokens, and the positions of each stack."""
        super().add_embeddings()
        shape, mesh = self.architecture, self.mesh
        self.encoder_positions = RelativePositions(shape, mesh, both_directions=True)
        self.decoder_positions = RelativePositions(shape, mesh, both_directions=False)

    def encoder_mask(self, tokens_BL: Tensor, document_ids: Tensor | None) -> Tensor:
        """Biases of the encoder's attention, -inf for padding and tokens of other samples."""
        biases: Tensor = self.encoder_positions(tokens_BL.shape[1])
        return _within_samples(biases, document_ids)

    def decoder_mask(self, tokens_BM: Tensor, document_ids: Tensor | None) -> Tensor:
        """Biases of the decoder's attention, -inf for later tokens and tokens of other samples."""
        length = tokens_BM.shape[1]
        later_LL = torch.ones(length, length, dtype=torch.bool, device=tokens_BM.device).triu(1)
        biases = self.decoder_positions(length).masked_fill(later_LL, -math.inf)
        return _within_samples(biases, document_ids)

    def output_logits(self, x_BMD: Tensor) -> Tensor:
        if self.architecture.tie_word_embeddings:
            x_BMD = x_BMD * self.architecture.hidden_size**-0.5
        return super().output_logits(x_BMD)


def _within_samples(biases: Tensor, document_ids: Tensor | None) -> Tensor:
    """Biases (1 or B, H, L, L) with -inf between tokens of different samples."""
    if document_ids is None:
        return biases
    apart_BLL = document_ids[:, :, None] != document_ids[:, None]
    return biases.masked_fill(apart_BLL[:, None], -math.inf)
