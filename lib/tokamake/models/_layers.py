"""Parts that model families are made of: rotary positions, attention, gated MLP.

Token states come in as x_BLD and leave as x_BLD; nothing here knows of checkpoints or ranks.
Shape suffixes: B batch, L tokens, S tokens attended to (cached ones first), D hidden size,
H query heads, G key and value heads, K width of a head.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tokamake.config import Architecture


def rotary(positions: Tensor, architecture: Architecture) -> tuple[Tensor, Tensor]:
    """Cosines and sines, fp32, of rotary position embedding (arXiv 2104.09864).

    Computed afresh in each forward pass: a buffer would be rounded by a cast of the model to bf16.

    Args:
        positions: (L,) of all rows, or (B, L) of each.
        architecture: shape of the model.

    Returns:
        (L, K) each, or (B, 1, L, K): as `rotate` takes them.
    """
    half = torch.arange(0, architecture.head_dim, 2, device=positions.device).float()
    frequencies = 1.0 / architecture.rope_theta ** (half / architecture.head_dim)
    angles = positions.float()[..., None] * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    if positions.dim() > 1:
        angles = angles[:, None]
    return angles.cos(), angles.sin()


def document_mask(document_ids_BL: Tensor) -> Tensor:
    """(B, 1, L, L), whether a token sees another: itself or one before it, of its own document."""
    length = document_ids_BL.shape[1]
    same_BLL = document_ids_BL[:, :, None] == document_ids_BL[:, None, :]
    return (same_BLL & same_BLL.new_ones(length, length).tril())[:, None]


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
        self,
        x_BLD: Tensor,
        cos_LK: Tensor,
        sin_LK: Tensor,
        cache: KeyValueCache | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Mix tokens: each sees itself and those before it, in the cache too, or what `mask`
        (B, 1, L, S) lets it see."""
        q_BHLK = self.q_proj(x_BLD).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        k_BGLK = self.k_proj(x_BLD).unflatten(-1, (self.num_key_value_heads, -1)).transpose(1, 2)
        v_BGSK = self.v_proj(x_BLD).unflatten(-1, (self.num_key_value_heads, -1)).transpose(1, 2)
        q_BHLK = rotate(q_BHLK, cos_LK, sin_LK)
        k_BGSK = rotate(k_BGLK, cos_LK, sin_LK)
        if cache is not None:
            k_BGSK, v_BGSK = cache.extend(k_BGSK, v_BGSK)
        length, total = q_BHLK.shape[2], k_BGSK.shape[2]
        if mask is None and 1 < length < total:
            # SDPA's own causal mask would align the first query with the first key.
            mask = x_BLD.new_ones(length, total, dtype=torch.bool).tril(total - length)
        y_BHLK = F.scaled_dot_product_attention(
            q_BHLK,
            k_BGSK,
            v_BGSK,
            attn_mask=mask,
            is_causal=mask is None and length > 1,
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
