"""Encoder-decoders: an encoder stack and a decoder stack.

The encoder reads a text in both directions. The decoder predicts each of its tokens from the
tokens before it and the states of the encoder (Vaswani et al. 2017, arXiv 1706.03762).
Shape suffixes: B batch, L tokens of the encoder, M tokens of the decoder, S tokens attended to,
D hidden size, H heads, K width of a head, V vocabulary.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor, nn

from tokamake.config.architecture import Architecture
from tokamake.models.common import recompute
from tokamake.models.common.language_model import LanguageModel, Output, PackedRows
from tokamake.models.common.layers import Attention, key_value_projection
from tokamake.parallel.attention import AttentionMask, attention
from tokamake.parallel.document_mask import UNMASKED, Unmasked, document_mask
from tokamake.parallel.dropout import Dropout, dropped
from tokamake.parallel.mesh import SINGLE_RANK, Mesh
from tokamake.parallel.score_rules import PLAIN_SCORES, ScoreRules
from tokamake.parallel.tensor import ColumnParallelLinear, RowParallelLinear, shared_input

_LAYER = re.compile(r"(encoder|decoder)\.layers\.(\d+)\.")


class CrossAttention(nn.Module):
    """Attention of the decoder's tokens to the encoder's.

    Attributes:
        number: layer index in the whole model.
    """

    def __init__(self, architecture: Architecture, mesh: Mesh = SINGLE_RANK) -> None:
        super().__init__()
        self.number = 0
        self._mesh, self._width = mesh, architecture.head_dim
        hidden, bias = architecture.hidden_size, architecture.attention_bias
        self.q_proj = ColumnParallelLinear(hidden, architecture.query_size, mesh=mesh, bias=bias)
        self.k_proj = key_value_projection(architecture, mesh, bias=bias)
        self.v_proj = key_value_projection(architecture, mesh, bias=bias)
        self.o_proj = RowParallelLinear(architecture.query_size, hidden, mesh=mesh, bias=bias)
        self.q_norm: nn.Module = nn.Identity()

    def forward(
        self, x_BMD: Tensor, memory_BLD: Tensor, mask: AttentionMask, dropout: Dropout | None
    ) -> Tensor:
        """Mix states of the encoder into the decoder's states.

        Args:
            memory_BLD: `shared_input` of the states of the encoder: all layers share it.
            mask: (B, 1, 1, L) bool, True for tokens, or (B, 1, M, L), True for tokens of the same
                sample; or `UNMASKED`.
        """
        x_BMD = shared_input(x_BMD, self._mesh)
        q_BHMK, k_BGLK, v_BGLK = (
            projected.unflatten(-1, (-1, self._width)).transpose(1, 2)
            for projected in (self.q_proj(x_BMD), self.k_proj(memory_BLD), self.v_proj(memory_BLD))
        )
        axis, rules = self._mesh.context, PLAIN_SCORES
        if dropout and dropout.attention:
            drop = partial(dropout.weights, axis=axis, layer=self, site="cross_attention")
            rules = ScoreRules(drop=drop)
        q_BHMK = self.q_norm(q_BHMK)
        y_BHMK = attention(q_BHMK, k_BGLK, v_BGLK, axis=axis, mask=mask, rules=rules)
        return self.o_proj(y_BHMK.transpose(1, 2).flatten(2))


class DecoderLayer(nn.Module):
    """A pre-norm layer: attention, cross-attention, MLP, each added to the residual stream.

    Attributes:
        norms_residual: whether the residual stream continues from the norm before cross-attention,
            not from its input.
    """

    norms_residual = False

    def __init__(
        self,
        norm: Callable[[], nn.Module],
        attention: Attention,
        *,
        cross_attention: CrossAttention,
        mlp: nn.Module,
    ) -> None:
        super().__init__()
        self.input_layernorm = norm()
        self.self_attn = attention
        self.cross_attn_layernorm = norm()
        self.cross_attn = cross_attention
        self.post_attention_layernorm = norm()
        self.mlp = mlp

    def forward(
        self,
        x_BMD: Tensor,
        memory_BLD: Tensor,
        mask: AttentionMask,
        memory_mask: AttentionMask,
        dropout: Dropout | None,
    ) -> Tensor:
        """Transform states of the decoder; see `Attention.forward` and `CrossAttention.forward`."""
        y_BMD: Tensor = self.self_attn(self.input_layernorm(x_BMD), None, None, mask, dropout)
        x_BMD = x_BMD + dropped(y_BMD, dropout, "attention_output", layer=self.self_attn)
        normed_BMD: Tensor = self.cross_attn_layernorm(x_BMD)
        if self.norms_residual:
            x_BMD = normed_BMD
        y_BMD = self.cross_attn(normed_BMD, memory_BLD, memory_mask, dropout)
        x_BMD = x_BMD + dropped(y_BMD, dropout, "cross_attention_output", layer=self.cross_attn)
        y_BMD = self.mlp(self.post_attention_layernorm(x_BMD))
        return x_BMD + dropped(y_BMD, dropout, "mlp_output", layer=self.self_attn)


class LayerStack(nn.Module):
    """Layers, and the norm after the last one."""

    def __init__(self, layers: Sequence[nn.Module], norm: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): layer for number, layer in enumerate(layers)})
        self.norm = norm


class EncoderDecoder(LanguageModel):
    """A whole encoder-decoder; pipelines do not divide it.

    A family may replace `build_cross_attention`, `encoder_mask`, `decoder_mask` and
    `output_logits`. Its setting `num_decoder_layers` is the number of layers of the decoder.
    """

    is_causal = False
    encoder: LayerStack
    decoder: LayerStack

    def build_cross_attention(self) -> CrossAttention:
        return CrossAttention(self.architecture, self.mesh)

    def build_decoder_layer(self) -> DecoderLayer:
        return DecoderLayer(
            self.build_norm,
            self.build_attention(),
            cross_attention=self.build_cross_attention(),
            mlp=self.build_mlp(),
        )

    def add_layers(self, numbers: range) -> None:
        """Add the layers of both stacks, and number them one stack after the other."""
        assert len(numbers) == self.architecture.num_hidden_layers, "pipelines are refused"
        num_decoder_layers = self.architecture.setting("num_decoder_layers")
        encoder = [self.build_layer() for _ in numbers]
        decoder = [self.build_decoder_layer() for _ in range(num_decoder_layers)]
        self.encoder = LayerStack(encoder, self.build_norm())
        self.decoder = LayerStack(decoder, self.build_norm())
        for number, layer in enumerate(encoder):
            layer.self_attn.number = number
        for number, decoder_layer in enumerate(decoder, len(encoder)):
            decoder_layer.self_attn.number = decoder_layer.cross_attn.number = number

    @property
    def blocks(self) -> list[nn.Module]:
        return [*self.encoder.layers.values(), *self.decoder.layers.values()]

    def layer_number(self, parameter: str) -> int | None:
        match = _LAYER.match(parameter)
        if not match:
            return None
        return int(match[2]) + len(self.encoder.layers) * (match[1] == "decoder")

    def add_output(self) -> None:
        """Add the output layer unless that is the embedding; the norm is the decoder's."""
        if not self.architecture.tie_word_embeddings:
            self.lm_head = self.build_output()

    def forward(
        self,
        x: Tensor,
        *,
        document_ids: Tensor | None = None,
        sample_numbers: Tensor | None = None,
        decoder_tokens: Tensor | None = None,
        decoder_document_ids: Tensor | None = None,
        label_places: Tensor | None = None,
    ) -> Output:
        """Predict each successor of the decoder's tokens; see `LanguageModel.forward`.

        Args:
            x: (B, L) int64 tokens of the encoder.
            document_ids: (B, L) numbers of the encoder's tokens: 0, and 1 for padding, which no
                token of the decoder sees. None: there is no padding.
            decoder_tokens: (B, M) int64 tokens of the decoder; padding comes last.
            decoder_document_ids: (B, M) number of the sample of each token of the decoder; then
                document_ids number the samples, too. None: each row is a sample.
            label_places: (N,) int64 flat index of tokens to predict in the (B, M) grid; logits are
                then (N, V), of these tokens alone. None: all tokens.
        """
        assert decoder_tokens is not None
        packed = packed_decoder = None
        if decoder_document_ids is not None:
            assert document_ids is not None
            packed, packed_decoder = PackedRows(document_ids), PackedRows(decoder_document_ids)
        memory_BLD = self.encoded(x, document_ids, sample_numbers, packed)
        dropout = self.dropout(decoder_tokens, sample_numbers, packed_decoder)
        if dropout and packed:
            dropout = dropout._replace(memory_positions=packed.position_ids)
        y_BMD = dropped(self.embedded(decoder_tokens, packed_decoder), dropout, "decoder_embedding")
        masks = (
            self.decoder_mask(decoder_tokens, decoder_document_ids),
            _memory_mask(document_ids, decoder_document_ids),
        )
        layers = [*self.decoder.layers.values()]
        y_BMD = recompute.run(layers, self.recompute, y_BMD, memory_BLD, *masks, dropout)
        y_BMD = shared_input(self.decoder.norm(y_BMD), self.mesh)
        if label_places is not None:
            # Much of a row is padding, and the product with the vocabulary is the largest one.
            return self.output_logits(y_BMD.flatten(0, 1).index_select(0, label_places))
        return self.output_logits(y_BMD)

    def encoded(
        self,
        tokens_BL: Tensor,
        document_ids: Tensor | None,
        sample_numbers: Tensor | None,
        packed: PackedRows | None = None,
    ) -> Tensor:
        """States of the encoder as `CrossAttention` takes them; see `forward` for the arguments."""
        dropout = self.dropout(tokens_BL, sample_numbers, packed)
        x_BLD = dropped(self.embedded(tokens_BL, packed), dropout, "embedding")
        layers, mask = [*self.encoder.layers.values()], self.encoder_mask(tokens_BL, document_ids)
        x_BLD = recompute.run(layers, self.recompute, x_BLD, None, None, mask, dropout)
        # Once for all layers of the decoder, whose gradients add up before ranks sum them.
        return shared_input(self.encoder.norm(x_BLD), self.mesh)

    def embedded(self, tokens_BL: Tensor, packed: PackedRows | None) -> Tensor:
        """States of tokens of either stack before its first layer, of this rank's `own_tokens`."""
        positions = packed.position_ids if packed else self.positions(tokens_BL)
        return self.token_states(tokens_BL, positions)

    def encoder_mask(self, tokens_BL: Tensor, document_ids: Tensor | None) -> AttentionMask:  # noqa: ARG002
        """Mask of the encoder's attention: tokens see the tokens of their sample."""
        return self.mask(document_ids)

    def decoder_mask(self, tokens_BM: Tensor, document_ids: Tensor | None) -> AttentionMask:  # noqa: ARG002
        """Mask of the decoder's attention, causal within a sample; None: each row is a sample."""
        if document_ids is None:
            return None
        return document_mask(document_ids, axis=self.mesh.context, method=self.mesh.context_method)


def _memory_mask(
    document_ids: Tensor | None, decoder_document_ids: Tensor | None
) -> Tensor | Unmasked:
    """Mask of cross-attention; see `CrossAttention.forward`."""
    if decoder_document_ids is not None:
        assert document_ids is not None
        return (decoder_document_ids[:, :, None] == document_ids[:, None])[:, None]
    return UNMASKED if document_ids is None else (document_ids == 0)[:, None, None]
