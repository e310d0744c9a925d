"""Modules that families share: attention, MLPs, transformer layer.

Each maps token states x_BLD to token states x_BLD. Parallel layers hide the ranks.
Shape suffixes: B batch, L tokens, S tokens attended to (cached ones first), D hidden size,
H query heads, G key and value heads, K width of a head.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tokamake.config.architecture import Architecture
from tokamake.models.common.key_value_cache import LayerCache
from tokamake.models.common.positions import rotate
from tokamake.parallel.attention import AttentionMask, attention
from tokamake.parallel.dropout import Dropout, dropped
from tokamake.parallel.mesh import SINGLE_RANK, Mesh
from tokamake.parallel.placement import Placement
from tokamake.parallel.score_rules import ScoreRules
from tokamake.parallel.tensor import (
    ColumnParallelLinear,
    JoinedLinear,
    ReplicatedLinear,
    RowParallelLinear,
    shared_input,
)


class Attention(nn.Module):
    """Self-attention; query heads share key and value heads (GQA, arXiv 2305.13245).

    Each tensor-parallel rank has some query heads, and the key and value heads that these use.
    `head_norm` builds the norms of query and of key heads, (..., heads, K), before rotation; see
    `head_norms`. `qkv_bias` says whether queries, keys and values have biases; None: as
    `attention_bias` says, which the output has, too. With `attention_sinks`, each head has a
    further score, which takes weight from the tokens (gpt-oss).

    Attributes:
        number: layer index in the whole model.
        rotates: whether the layer has rotary positions, if the model has some.
        window: tokens that a token sees, itself included; None: all earlier ones.
    """

    def __init__(
        self,
        architecture: Architecture,
        mesh: Mesh = SINGLE_RANK,
        *,
        head_norm: Callable[..., nn.Module] = nn.Identity,
        qkv_bias: bool | None = None,
    ) -> None:
        super().__init__()
        self.number, self.rotates = 0, True
        self.window: int | None = None
        self._mesh, self._width = mesh, architecture.head_dim
        self._rotary_width = architecture.rotary_width
        self._rotates_by_kind = architecture.local_rope_theta > 0
        self._softcap, self._scale = architecture.attention_softcap, architecture.query_scale
        hidden, query = architecture.hidden_size, architecture.query_size
        out_bias = architecture.attention_bias
        bias = out_bias if qkv_bias is None else qkv_bias
        self.q_proj = ColumnParallelLinear(hidden, query, mesh=mesh, bias=bias)
        self.k_proj = key_value_projection(architecture, mesh, bias=bias)
        self.v_proj = key_value_projection(architecture, mesh, bias=bias)
        self.o_proj = RowParallelLinear(query, hidden, mesh=mesh, bias=out_bias)
        heads, groups = architecture.num_attention_heads, architecture.num_key_value_heads
        self.q_norm, self.k_norm = (
            head_norm(architecture, mesh, num_heads=number) for number in (heads, groups)
        )
        width = architecture.head_dim
        self._heads = (len(self.q_proj.weight) // width, groups, width)
        self.sinks: nn.Parameter | None = None
        if architecture.attention_sinks:
            self.sinks = nn.Parameter(torch.empty(self._heads[0]))
            self.placements = {"sinks": Placement(0)} if mesh.tensor.size > 1 else {}
        self.qkv_proj: JoinedLinear | None = None

    @property
    def is_alone(self) -> bool:
        """Whether no other rank has a part of the heads or of the tokens."""
        return self._mesh.tensor.size == self._mesh.context.size == 1

    @property
    def rotates_whole_heads(self) -> bool:
        """Whether the layer has rotary positions that turn all of each head, and nothing else."""
        is_plain = self._scale == 1.0 and not self._softcap and not self._rotates_by_kind
        is_plain = is_plain and self.sinks is None
        return self.rotates and self._rotary_width == self._width and is_plain

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Query heads of this rank, its key and value heads, and the width of a head."""
        return self._heads

    def join_projections(self) -> None:
        """Compute queries, keys and values as one product; only for inference."""
        self.qkv_proj = JoinedLinear([self.q_proj, self.k_proj, self.v_proj])
        del self.q_proj, self.k_proj, self.v_proj

    def _projected(self, x_BLD: Tensor) -> Sequence[Tensor]:
        if self.qkv_proj is not None:
            projected: Sequence[Tensor] = self.qkv_proj(x_BLD)
            return projected
        return [projection(x_BLD) for projection in (self.q_proj, self.k_proj, self.v_proj)]

    def forward(
        self,
        x_BLD: Tensor,
        cos_LK: Tensor | None,
        sin_LK: Tensor | None,
        mask: AttentionMask = None,
        dropout: Dropout | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Mix tokens: each sees itself and earlier ones, also cached ones, or the tokens of `mask`.

        Args:
            cos_LK: cosines of rotary positions; None: heads are not rotated.
            mask: see `parallel.attention.attention`; None: causal.
        """
        x_BLD = shared_input(x_BLD, self._mesh)
        q_BLHK, k_BLGK, v_BLGK = (
            projected.unflatten(-1, (-1, self._width)) for projected in self._projected(x_BLD)
        )
        q_BHLK = self.q_norm(q_BLHK).transpose(1, 2)
        k_BGSK = self.k_norm(k_BLGK).transpose(1, 2)
        v_BGSK = v_BLGK.transpose(1, 2)
        if self._scale != 1.0:
            q_BHLK = q_BHLK * self._scale
        if self.rotates and cos_LK is not None and sin_LK is not None:
            if self._rotates_by_kind:
                kind = int(self.window is not None)
                cos_LK, sin_LK = cos_LK[kind], sin_LK[kind]
            q_BHLK = rotate(q_BHLK, cos_LK, sin_LK)
            k_BGSK = rotate(k_BGSK, cos_LK, sin_LK)
        if cache is not None:  # S: these tokens and the cached ones
            k_BGSK, v_BGSK = cache.extend(k_BGSK, v_BGSK, window=self.window)
            mask = cache.mask(mask, window=self.window)
        axis, method = self._mesh.context, self._mesh.context_method
        # A mask of cached keys has the window: columns of its rows are different places.
        window = None if isinstance(mask, Tensor) else self.window
        rules = ScoreRules(window, self._softcap, sinks=self.sinks)
        if dropout and dropout.attention:
            rules = rules._replace(drop=partial(dropout.weights, axis=axis, layer=self))
        y_BHLK = attention(q_BHLK, k_BGSK, v_BGSK, axis=axis, method=method, mask=mask, rules=rules)
        return self.o_proj(y_BHLK.transpose(1, 2).flatten(2))


def key_value_projection(architecture: Architecture, mesh: Mesh, *, bias: bool) -> nn.Linear:
    """Projection to this rank's key or value heads; the whole weight where ranks share a head."""
    hidden, width = architecture.hidden_size, architecture.head_dim
    groups = architecture.num_key_value_heads
    if groups % mesh.tensor.size == 0:
        return ColumnParallelLinear(hidden, groups * width, mesh=mesh, bias=bias)
    head = mesh.tensor.rank * groups // mesh.tensor.size
    rows = range(head * width, (head + 1) * width)
    return ReplicatedLinear(hidden, groups * width, mesh=mesh, rows=rows, bias=bias)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}
"""Activations by Hugging Face's names."""


class MLP(nn.Module):
    """Feed-forward layer without a gate."""

    def __init__(self, architecture: Architecture, mesh: Mesh = SINGLE_RANK) -> None:
        super().__init__()
        self._mesh, self._activation = mesh, ACTIVATIONS[architecture.hidden_act]
        hidden, inner = architecture.hidden_size, architecture.intermediate_size
        self.up_proj = ColumnParallelLinear(hidden, inner, mesh=mesh, bias=architecture.mlp_bias)
        self.down_proj = RowParallelLinear(inner, hidden, mesh=mesh, bias=architecture.mlp_bias)

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Transform each token on its own."""
        x_BLD = shared_input(x_BLD, self._mesh)
        return self.down_proj(self._activation(self.up_proj(x_BLD)))


class GatedMLP(nn.Module):
    """Feed-forward layer with a gate, such as SwiGLU (arXiv 2002.05202).

    `width` is its inner width; None: `intermediate_size`.
    """

    def __init__(
        self,
        architecture: Architecture,
        mesh: Mesh = SINGLE_RANK,
        *,
        width: int | None = None,
    ) -> None:
        super().__init__()
        self._mesh, self._activation = mesh, ACTIVATIONS[architecture.hidden_act]
        hidden, inner = architecture.hidden_size, width or architecture.intermediate_size
        bias = architecture.mlp_bias
        self.gate_proj = ColumnParallelLinear(hidden, inner, mesh=mesh, bias=bias)
        self.up_proj = ColumnParallelLinear(hidden, inner, mesh=mesh, bias=bias)
        self.down_proj = RowParallelLinear(inner, hidden, mesh=mesh, bias=bias)
        self.gate_up_proj: JoinedLinear | None = None

    def join_projections(self) -> None:
        """Compute the gate and the states as one product; only for inference."""
        self.gate_up_proj = JoinedLinear([self.gate_proj, self.up_proj])
        del self.gate_proj, self.up_proj

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Transform each token on its own."""
        x_BLD = shared_input(x_BLD, self._mesh)
        if self.gate_up_proj is not None:
            gate, up = self.gate_up_proj(x_BLD)
        else:
            gate, up = self.gate_proj(x_BLD), self.up_proj(x_BLD)
        return self.down_proj(self._activation(gate) * up)


class TransformerLayer(nn.Module):
    """A pre-norm layer: attention, then MLP, each added to the residual stream."""

    def __init__(
        self, norm: Callable[[], nn.Module], attention: Attention, *, mlp: nn.Module
    ) -> None:
        super().__init__()
        self.input_layernorm = norm()
        self.self_attn = attention
        self.post_attention_layernorm = norm()
        self.mlp = mlp

    def forward(
        self,
        x_BLD: Tensor,
        cos_LK: Tensor | None,
        sin_LK: Tensor | None,
        mask: AttentionMask = None,
        dropout: Dropout | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Transform token states; see `Attention.forward` for the arguments."""
        y_BLD: Tensor = self.self_attn(
            self.input_layernorm(x_BLD), cos_LK, sin_LK, mask, dropout, cache
        )
        x_BLD = x_BLD + dropped(y_BLD, dropout, "attention_output", layer=self.self_attn)
        y_BLD = self.mlp(self.post_attention_layernorm(x_BLD))
        return x_BLD + dropped(y_BLD, dropout, "mlp_output", layer=self.self_attn)


class PostNormLayer(nn.Module):
    """A layer that norms the results of attention and MLP, before they are added (OLMo 2).

    Its norms have the names of Hugging Face's Gemma 2.
    """

    def __init__(
        self, norm: Callable[[], nn.Module], attention: Attention, *, mlp: nn.Module
    ) -> None:
        super().__init__()
        self.self_attn = attention
        self.post_attention_layernorm = norm()
        self.mlp = mlp
        self.post_feedforward_layernorm = norm()

    def forward(
        self,
        x_BLD: Tensor,
        cos_LK: Tensor | None,
        sin_LK: Tensor | None,
        mask: AttentionMask = None,
        dropout: Dropout | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Transform token states; see `Attention.forward` for the arguments."""
        y_BLD: Tensor = self.self_attn(x_BLD, cos_LK, sin_LK, mask, dropout, cache)
        y_BLD = self.post_attention_layernorm(y_BLD)
        x_BLD = x_BLD + dropped(y_BLD, dropout, "attention_output", layer=self.self_attn)
        y_BLD = self.post_feedforward_layernorm(self.mlp(x_BLD))
        return x_BLD + dropped(y_BLD, dropout, "mlp_output", layer=self.self_attn)


class SandwichLayer(nn.Module):
    """A layer that norms inputs and results of attention and MLP (Gemma 2, arXiv 2408.00118)."""

    def __init__(
        self, norm: Callable[[], nn.Module], attention: Attention, *, mlp: nn.Module
    ) -> None:
        super().__init__()
        self.input_layernorm = norm()
        self.self_attn = attention
        self.post_attention_layernorm = norm()
        self.pre_feedforward_layernorm = norm()
        self.mlp = mlp
        self.post_feedforward_layernorm = norm()

    def forward(
        self,
        x_BLD: Tensor,
        cos_LK: Tensor | None,
        sin_LK: Tensor | None,
        mask: AttentionMask = None,
        dropout: Dropout | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Transform token states; see `Attention.forward` for the arguments."""
        y_BLD: Tensor = self.self_attn(
            self.input_layernorm(x_BLD), cos_LK, sin_LK, mask, dropout, cache
        )
        y_BLD = self.post_attention_layernorm(y_BLD)
        x_BLD = x_BLD + dropped(y_BLD, dropout, "attention_output", layer=self.self_attn)
        y_BLD = self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x_BLD)))
        return x_BLD + dropped(y_BLD, dropout, "mlp_output", layer=self.self_attn)


class ParallelLayer(TransformerLayer):
    """A pre-norm layer whose attention and MLP see the same states (GPT-NeoX, arXiv 2204.06745)."""

    def forward(
        self,
        x_BLD: Tensor,
        cos_LK: Tensor | None,
        sin_LK: Tensor | None,
        mask: AttentionMask = None,
        dropout: Dropout | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Transform token states; see `Attention.forward` for the arguments."""
        y_BLD: Tensor = self.self_attn(
            self.input_layernorm(x_BLD), cos_LK, sin_LK, mask, dropout, cache
        )
        y_BLD = dropped(y_BLD, dropout, "attention_output", layer=self.self_attn)
        z_BLD: Tensor = self.mlp(self.post_attention_layernorm(x_BLD))
        return x_BLD + y_BLD + dropped(z_BLD, dropout, "mlp_output", layer=self.self_attn)
