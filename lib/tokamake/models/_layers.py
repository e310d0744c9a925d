"""Parts that model families are made of: rotary positions, attention, gated MLP.

Token states come in as x_BLD and leave as x_BLD; nothing here knows of checkpoints or ranks.
Shape suffixes: B batch, L tokens, S tokens attended to (cached ones first), D hidden size,
H query heads, G key and value heads, K width of a head.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tokamake.config import Architecture


def rotary(positions_L: Tensor, architecture: Architecture) -> tuple[Tensor, Tensor]:
    """Cosines and sines (L, K), fp32, of rotary position embedding (arXiv 2104.09864).

    Computed afresh in each forward pass: a buffer would be rounded by a cast of the model to bf16.
    """
    half = torch.arange(0, architecture.head_dim, 2, device=positions_L.device).float()
    frequencies = 1.0 / architecture.rope_theta ** (half / architecture.head_dim)
    angles_LK = torch.outer(positions_L.float(), frequencies).repeat(1, 2)
    return angles_LK.cos(), angles_LK.sin()


def rotate(x_BHLK: Tensor, cos_LK: Tensor, sin_LK: Tensor) -> Tensor:
    """Turn each head by its positions' angles; pairs are (i, i + K/2), Hugging Face's order."""
    first, second = x_BHLK.chunk(2, dim=-1)
    return x_BHLK * cos_LK + torch.cat((-second, first), dim=-1) * sin_LK


class KeyValueCache:
    """Keys and values of one layer, so that decoding does not repeat the tokens before."""

    def __init__(self) -> None:
        self._keys_and_values: tuple[Tensor, Tensor] | None = None

    @property
    def length(self) -> int:
        """Tokens held."""
        return 0 if self._keys_and_values is None else self._keys_and_values[0].shape[2]

    def extend(self, k_BGLK: Tensor, v_BGLK: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys and values of new tokens; return those of all tokens."""
        if self._keys_and_values is not None:
            keys_BGSK, values_BGSK = self._keys_and_values
            k_BGLK = torch.cat((keys_BGSK, k_BGLK), dim=2)
            v_BGLK = torch.cat((values_BGSK, v_BGLK), dim=2)
        self._keys_and_values = k_BGLK, v_BGLK
        return self._keys_and_values


class Attention(nn.Module):
    """Causal self-attention; query heads share key and value heads (GQA, arXiv 2305.13245)."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.num_heads = architecture.num_attention_heads
        self.num_key_value_heads = architecture.num_key_value_heads
        hidden = architecture.hidden_size
        key_value = architecture.num_key_value_heads * architecture.head_dim
        self.q_proj = nn.Linear(hidden, hidden, bias=False)
        self.k_proj = nn.Linear(hidden, key_value, bias=False)
        self.v_proj = nn.Linear(hidden, key_value, bias=False)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)

    def forward(
        self, x_BLD: Tensor, cos_LK: Tensor, sin_LK: Tensor, cache: KeyValueCache | None = None
    ) -> Tensor:
        """Mix tokens: each sees itself and those before it, in the cache too."""
        q_BHLK = self.q_proj(x_BLD).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        k_BGLK = self.k_proj(x_BLD).unflatten(-1, (self.num_key_value_heads, -1)).transpose(1, 2)
        v_BGSK = self.v_proj(x_BLD).unflatten(-1, (self.num_key_value_heads, -1)).transpose(1, 2)
        q_BHLK = rotate(q_BHLK, cos_LK, sin_LK)
        k_BGSK = rotate(k_BGLK, cos_LK, sin_LK)
        if cache is not None:
            k_BGSK, v_BGSK = cache.extend(k_BGSK, v_BGSK)
        length, total = q_BHLK.shape[2], k_BGSK.shape[2]
        mask_LS = None
        if 1 < length < total:
            # SDPA's own causal mask would align the first query with the first key.
            mask_LS = x_BLD.new_ones(length, total, dtype=torch.bool).tril(total - length)
        y_BHLK = F.scaled_dot_product_attention(
            q_BHLK,
            k_BGSK,
            v_BGSK,
            attn_mask=mask_LS,
            is_causal=1 < length == total,
            enable_gqa=self.num_heads != self.num_key_value_heads,
        )
        return self.o_proj(y_BHLK.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Feed-forward layer gated by SiLU, called SwiGLU (arXiv 2002.05202)."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        hidden, inner = architecture.hidden_size, architecture.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Transform each token by itself."""
        return self.down_proj(F.silu(self.gate_proj(x_BLD)) * self.up_proj(x_BLD))
