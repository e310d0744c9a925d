"""Latent attention (MLA, DeepSeek-V2, arXiv 2405.04434): heads share one compressed vector a token.

Keys and values of all heads are products of a latent vector, and a cache keeps it and the rotated
part of the key alone. Tensor-parallel ranks divide the heads; each computes the latent vectors.
Shape suffixes: B batch, L tokens, S tokens attended to (cached ones first), D hidden size, H query
heads of this rank, K width of queries and keys, V width of values, C width of the latent vector, R
width of the part that rotates.
"""

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tokamake.config.architecture import Architecture
from tokamake.models.common.key_value_cache import LayerCache
from tokamake.models.common.positions import rotate, yarn_score_factor
from tokamake.parallel.attention import AttentionMask, attention
from tokamake.parallel.dropout import Dropout
from tokamake.parallel.mesh import SINGLE_RANK, Mesh
from tokamake.parallel.placement import Placement
from tokamake.parallel.score_rules import PLAIN_SCORES
from tokamake.parallel.tensor import (
    ColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    shared_input,
)

_EPS = 1e-6
"""Added to the mean square in the norms of latent vectors: not `rms_norm_eps`."""


class LatentNorm(nn.RMSNorm):
    """Norm of the latent vectors, which all tensor-parallel ranks compute."""

    def __init__(self, width: int, mesh: Mesh) -> None:
        super().__init__(width, eps=_EPS)
        # A rank uses it for its heads alone, so the gradient is partial.
        self.placements = {"weight": Placement(partial=mesh.tensor.size > 1)}


class LatentAttention(nn.Module):
    """Self-attention with latent vectors; queries have one of their own if `q_lora_rank` is not 0.

    Attributes:
        number: layer index in the whole model.
        rotates: whether the layer has rotary positions.
        window: None: a token sees all earlier ones.
    """

    def __init__(self, architecture: Architecture, mesh: Mesh = SINGLE_RANK) -> None:
        super().__init__()
        self.number, self.rotates = 0, True
        self.window: int | None = None
        own = architecture.setting
        self._mesh, self._width = mesh, architecture.head_dim
        self._latent, self._rotary = own("kv_lora_rank"), own("qk_rope_head_dim")
        self._plain, self._value = own("qk_nope_head_dim"), own("v_head_dim")
        self._interleaves: bool = (architecture.model_extra or {}).get("rope_interleave", True)
        self._factor = yarn_score_factor(architecture.rope_scaling)
        hidden, query = architecture.hidden_size, architecture.query_size
        heads, bias = architecture.num_attention_heads, architecture.attention_bias
        if rank := own("q_lora_rank"):
            self.q_a_proj = _whole(hidden, rank, mesh=mesh, bias=bias)
            self.q_a_layernorm = LatentNorm(rank, mesh)
            self.q_b_proj = ColumnParallelLinear(rank, query, mesh=mesh)
        else:
            self.q_proj = ColumnParallelLinear(hidden, query, mesh=mesh)
        width = self._latent + self._rotary
        self.kv_a_proj_with_mqa = _whole(hidden, width, mesh=mesh, bias=bias)
        self.kv_a_layernorm = LatentNorm(self._latent, mesh)
        both = heads * (self._plain + self._value)
        self.kv_b_proj = ColumnParallelLinear(self._latent, both, mesh=mesh)
        self.o_proj = RowParallelLinear(architecture.value_size, hidden, mesh=mesh, bias=bias)
        self._queries_latent = rank > 0

    def forward(
        self,
        x_BLD: Tensor,
        cos_LK: Tensor | None,
        sin_LK: Tensor | None,
        mask: AttentionMask = None,
        dropout: Dropout | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Mix tokens; see `layers.Attention.forward` for the arguments."""
        x_BLD = shared_input(x_BLD, self._mesh)
        q_BHLK = self._queries(x_BLD).unflatten(-1, (-1, self._width)).transpose(1, 2)
        widths = [self._latent, self._rotary]
        c_BLC, k_BLR = self.kv_a_proj_with_mqa(x_BLD).split(widths, -1)
        c_BSC, k_B1SR = self.kv_a_layernorm(c_BLC), k_BLR[:, None]
        q_BHLP, q_BHLR = q_BHLK.split([self._plain, self._rotary], -1)
        if self.rotates and cos_LK is not None and sin_LK is not None:
            q_BHLR = rotate(self._halves(q_BHLR), cos_LK, sin_LK)
            k_B1SR = rotate(self._halves(k_B1SR), cos_LK, sin_LK)
        q_BHLK = torch.cat((q_BHLP, q_BHLR), -1) * self._factor
        if cache is not None:  # S: these tokens and the cached ones
            c_B1SC, k_B1SR = cache.extend(c_BSC[:, None], k_B1SR)
            c_BSC = c_B1SC[:, 0]
            if self._is_cheaper_compressed(x_BLD.shape[1]):
                return self.o_proj(self._by_latents(q_BHLK, c_B1SC, k_B1SR, mask))
        kv_BHSK = self.kv_b_proj(c_BSC).unflatten(-1, (-1, self._plain + self._value))
        k_BHSP, v_BHSV = kv_BHSK.transpose(1, 2).split([self._plain, self._value], -1)
        k_BHSK = torch.cat((k_BHSP, k_B1SR.expand(-1, k_BHSP.shape[1], -1, -1)), -1)
        rules = PLAIN_SCORES
        if dropout and dropout.attention:
            drop = partial(dropout.weights, axis=self._mesh.context, layer=self)
            rules = rules._replace(drop=drop)
        axis, method = self._mesh.context, self._mesh.context_method
        q, k, v = _as_wide(q_BHLK, k_BHSK, v_BHSV)
        y_BHLV = attention(q, k, v, axis=axis, method=method, mask=mask, rules=rules)
        y_BHLV = y_BHLV[..., : self._value]
        return self.o_proj(y_BHLV.transpose(1, 2).flatten(2))

    def _queries(self, x_BLD: Tensor) -> Tensor:
        if self._queries_latent:
            return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BLD)))
        return self.q_proj(x_BLD)

    def _halves(self, x_BHLR: Tensor) -> Tensor:
        """Pairs (2i, 2i + 1) as pairs (i, i + R/2), which `rotate` turns; scores are the same."""
        if not self._interleaves:
            return x_BHLR
        return x_BHLR.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)

    def _is_cheaper_compressed(self, length: int) -> bool:
        """Whether scores of latent vectors take fewer multiply-adds than keys and values."""
        further = 2 * self._latent - self._plain - self._value
        return length * further < self._latent * (self._plain + self._value)

    def _by_latents(
        self, q_BHLK: Tensor, c_B1SC: Tensor, k_B1SR: Tensor, mask: AttentionMask
    ) -> Tensor:
        """Attention to latent vectors: queries and results take over the products of a head.

        Returns:
            (B, L, H × V).
        """
        width = self._plain + self._value
        weight_HWC = self.kv_b_proj.weight.unflatten(0, (-1, width))
        of_keys_HPC, of_values_HVC = weight_HWC.split([self._plain, self._value], 1)
        q_BHLP, q_BHLR = q_BHLK.split([self._plain, self._rotary], -1)
        latent_BHLC = q_BHLP @ of_keys_HPC
        queries = torch.cat((latent_BHLC, q_BHLR), -1)
        # Attention divides by the root of the width of these queries.
        queries = queries * math.sqrt(queries.shape[-1] / self._width)
        keys = torch.cat((c_B1SC, k_B1SR), -1)
        y_BHLC = attention(queries, keys, keys, axis=self._mesh.context, mask=mask)
        y_BHLV = y_BHLC[..., : self._latent] @ of_values_HVC.mT
        return y_BHLV.transpose(1, 2).flatten(2)


def _whole(width_in: int, width_out: int, *, mesh: Mesh, bias: bool) -> ReplicatedLinear:
    """A projection to vectors that all heads share: each rank computes all of them."""
    return ReplicatedLinear(width_in, width_out, mesh=mesh, rows=range(width_out), bias=bias)


def _as_wide(q_BHLK: Tensor, k_BHSK: Tensor, v_BHSV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of one width, as fused kernels need them: zeros fill them up."""
    missing = q_BHLK.shape[-1] - v_BHSV.shape[-1]
    if missing >= 0:
        return q_BHLK, k_BHSK, F.pad(v_BHSV, (0, missing))
    # Attention divides by the root of the width of these queries.
    q_BHLK = q_BHLK * math.sqrt(v_BHSV.shape[-1] / q_BHLK.shape[-1])
    return F.pad(q_BHLK, (0, -missing)), F.pad(k_BHSK, (0, -missing)), v_BHSV
