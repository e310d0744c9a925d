"""Costs of a layer: activations that it saves for its backward pass, floating-point operations.

A family's memory.py has `saved_activations`, bytes per token of a layer, `saved_by_decoder`, of a
layer of a decoder, and `flops_per_token`, forward and backward; for an encoder-decoder, the
operations of a sample by tokens of the encoder.

Activations: Korthikanti et al. 2022 (arXiv 2205.05198), section 4, as torch saves them: without
dropout masks, and without attention scores, because SDPA computes them again. Operations are
counted as PaLM does (arXiv 2204.02311, appendix B). Only matrix products count, with two operations
per multiply-add. The backward pass takes twice the forward pass. Attention counts the whole
sequence, or the whole window, as if it were not causal. The embedding is a look-up and free; the
output layer is a product.
"""

from collections.abc import Callable
from typing import NamedTuple

from tokamake.config.architecture import Architecture


class SavedActivations(NamedTuple):
    """Bytes per token that a layer saves, by the ranks that share them."""

    states: int
    """Inputs of norms: sequence parallelism shares them."""
    gathered: int
    """Inputs of column-parallel layers: no ranks share them."""
    split: int
    """Heads and the width of the MLP: tensor-parallel ranks share them."""
    products: int
    """The results of matrix products and attention in `split`: selective recomputation saves
    these alone."""


def attention_bytes(architecture: Architecture, size: int) -> int:
    """Queries, keys, values, result of attention (`size` bytes a number), fp32 normalizers."""
    num_values = 2 * (architecture.query_size + architecture.key_value_size)
    return num_values * size + 4 * architecture.num_attention_heads


def rms_norm_bytes(width: int, size: int, *, fused: bool) -> int:
    """Input of an RMSNorm, which it saves; unfused, as on CPUs, two fp32 copies instead."""
    return width * size if fused else 2 * width * 4


def plain_layer(architecture: Architecture, *, size: int, fused_norm: bool) -> SavedActivations:
    """Bytes per token of a layer with LayerNorms and an MLP without a gate.

    LayerNorm is one kernel on all devices and saves its input. The MLP saves the input and the
    output of its activation. See `gated_layer` for attention and the arguments.
    """
    attention = attention_bytes(architecture, size)
    inner = architecture.intermediate_size * size
    return SavedActivations(
        states=2 * architecture.hidden_size * size,
        gathered=2 * architecture.hidden_size * size,
        split=attention + 2 * inner,
        products=attention + inner,
    )


def gated_layer(architecture: Architecture, *, size: int, fused_norm: bool) -> SavedActivations:
    """Bytes per token of a layer with RMSNorms and a gated MLP.

    Both norms save their inputs; their outputs are the inputs of projections. Attention saves
    queries, keys, values, its result and normalizers. The MLP saves the gate, its SiLU, the up
    projection and their product.

    Args:
        size: bytes per number of the forward pass.
        fused_norm: whether the device has RMSNorm as one kernel.
    """
    attention, hidden = attention_bytes(architecture, size), architecture.hidden_size
    inner = architecture.intermediate_size * size
    return SavedActivations(
        states=2 * rms_norm_bytes(hidden, size, fused=fused_norm),
        gathered=2 * hidden * size,
        split=attention + 4 * inner,
        products=attention + 2 * inner,
    )


def gated_layer_with_head_norms(
    architecture: Architecture, *, size: int, fused_norm: bool
) -> SavedActivations:
    """Bytes per token of a gated layer whose queries and keys are normed; see `gated_layer`."""
    layer = gated_layer(architecture, size=size, fused_norm=fused_norm)
    return with_head_norms(architecture, layer, size=size, fused_norm=fused_norm)


def gated_layer_with_four_norms(
    architecture: Architecture,
    *,
    size: int,
    fused_norm: bool,
    of_layer: Callable[..., SavedActivations] = gated_layer,
) -> SavedActivations:
    """Bytes per token of a gated layer that norms inputs and results; see `gated_layer`."""
    layer = of_layer(architecture, size=size, fused_norm=fused_norm)
    return layer._replace(states=2 * layer.states)


def gated_experts(architecture: Architecture, *, size: int, fused_norm: bool) -> SavedActivations:
    """Bytes per token of a layer with RMSNorms and a mixture of gated experts.

    The router saves the probabilities of all experts (fp32), those of the chosen ones, and the
    order of tokens by expert (int64). Each of a token's experts saves the token's states, its gate,
    its SiLU, the up projection, their product, and this times the weight of the expert. See
    `gated_layer` for the rest.
    """
    layer = gated_layer(architecture, size=size, fused_norm=fused_norm)
    number, chosen = (architecture.setting(f"num_experts{each}") for each in ("", "_per_tok"))
    inner = chosen * architecture.expert_size * size
    copies = chosen * architecture.hidden_size * size
    dense = architecture.intermediate_size * size
    router = 4 * number + chosen * 28
    return SavedActivations(
        states=layer.states,
        gathered=layer.gathered + copies + router,
        split=layer.split - 4 * dense + 5 * inner,
        products=layer.products - 2 * dense + 2 * inner,
    )


def gated_experts_with_head_norms(
    architecture: Architecture, *, size: int, fused_norm: bool
) -> SavedActivations:
    """Bytes per token of a layer with experts whose queries and keys are normed."""
    layer = gated_experts(architecture, size=size, fused_norm=fused_norm)
    return with_head_norms(architecture, layer, size=size, fused_norm=fused_norm)


def gated_experts_with_biases(
    architecture: Architecture, *, size: int, fused_norm: bool
) -> SavedActivations:
    """Bytes per token of a layer with clamped experts that have biases.

    Each of a token's experts saves its gate and up projection, the states between the products, and
    its result, which the weight of the expert multiplies.
    """
    layer = gated_experts(architecture, size=size, fused_norm=fused_norm)
    chosen = architecture.setting("num_experts_per_tok")
    inner = chosen * architecture.expert_size * size
    results = chosen * architecture.hidden_size * size
    return layer._replace(gathered=layer.gathered + results, split=layer.split - 2 * inner)


def with_head_norms(
    architecture: Architecture, layer: SavedActivations, *, size: int, fused_norm: bool
) -> SavedActivations:
    """A layer that also norms queries and keys."""
    width = architecture.query_size + architecture.key_value_size
    return layer._replace(split=layer.split + rms_norm_bytes(width, size, fused=fused_norm))


def gated_experts_with_latent_attention(
    architecture: Architecture, *, size: int, fused_norm: bool, fp32_router: bool = True
) -> SavedActivations:
    """Bytes per token of a layer with experts and latent attention; a dense layer has fewer.

    Latent vectors are saved as inputs of their norms and of projections to heads. Queries, keys,
    values and the result of attention have the larger width of keys and values; the result is saved
    in the width of values once more.

    Args:
        fp32_router: whether the router multiplies states in fp32.
    """
    layer = gated_experts_with_shared(
        architecture, size=size, fused_norm=fused_norm, fp32_router=fp32_router
    )
    own, heads = architecture.setting, architecture.num_attention_heads
    width = max(architecture.head_dim, own("v_head_dim"))
    attention = 4 * heads * width * size + 4 * heads
    results = architecture.value_size * size
    ranks = own("q_lora_rank"), own("kv_lora_rank")
    latents = sum(each * size + rms_norm_bytes(each, size, fused=fused_norm) for each in ranks)
    usual = attention_bytes(architecture, size)
    return SavedActivations(
        states=layer.states,
        gathered=layer.gathered + latents,
        split=layer.split - usual + attention + results,
        products=layer.products - usual + attention,
    )


def gated_experts_with_shared(
    architecture: Architecture, *, size: int, fused_norm: bool, fp32_router: bool
) -> SavedActivations:
    """Bytes per token of a layer with experts, some of which all tokens share."""
    layer = gated_experts(architecture, size=size, fused_norm=fused_norm)
    shared = architecture.setting("n_shared_experts") * architecture.expert_size * size
    wide = 4 * architecture.hidden_size if fp32_router and size < 4 else 0
    return layer._replace(
        gathered=layer.gathered + wide,
        split=layer.split + 4 * shared,
        products=layer.products + 2 * shared,
    )


def decoder_layer(
    architecture: Architecture,
    *,
    size: int,
    fused_norm: bool,
    encoder_tokens: float,
    of_layer: Callable[..., SavedActivations],
) -> SavedActivations:
    """Bytes per token of a decoder's layer, which has cross-attention.

    Cross-attention saves the input of its norm and of its queries, queries, result and normalizers,
    and keys and values of the encoder's tokens. All layers share the states of the encoder.

    Args:
        encoder_tokens: tokens of the encoder for each token of the decoder.
        of_layer: bytes per token of a layer without cross-attention.
    """
    layer = of_layer(architecture, size=size, fused_norm=fused_norm)
    cross = 2 * architecture.query_size * size + 4 * architecture.num_attention_heads
    cross += round(encoder_tokens * 2 * architecture.key_value_size * size)
    return SavedActivations(
        states=layer.states + layer.states // 2,  # three norms instead of two
        gathered=layer.gathered + architecture.hidden_size * size,
        split=layer.split + cross,
        products=layer.products + cross,
    )


def saved_mask_bytes(architecture: Architecture, length: int, *, size: int) -> float:
    """Mean bytes of the mask that a layer saves for a row of documents without flash attention.

    torch's own attention saves a bias, `size` bytes a number, the arithmetic of caps and sinks a
    bool mask. Blocks of queries are as long as a window, and see as many earlier tokens.
    """
    windows = [architecture.window(number) for number in range(architecture.num_hidden_layers)]
    seen = [min(length, 2 * window) if window else length for window in windows]
    return length * sum(seen) / len(seen) * (1 if architecture.needs_scores else size)


class AttentionProducts(NamedTuple):
    """Multiply-adds of attention in a layer."""

    of_token: int
    """Projections of a token."""
    of_pair: int
    """Score and values of two tokens, in all heads."""


def attention_products(architecture: Architecture) -> AttentionProducts:
    """Multiply-adds of grouped heads."""
    query = architecture.query_size
    projections = 2 * architecture.hidden_size * (query + architecture.key_value_size)
    return AttentionProducts(projections, 2 * query)


def latent_attention_products(architecture: Architecture) -> AttentionProducts:
    """Multiply-adds of latent attention in training, where all heads have keys and values."""
    own, hidden = architecture.setting, architecture.hidden_size
    query, value, latent = architecture.query_size, architecture.value_size, own("kv_lora_rank")
    rank = own("q_lora_rank")
    queries = rank * (hidden + query) if rank else hidden * query
    plain = architecture.num_attention_heads * own("qk_nope_head_dim")
    keys = hidden * (latent + own("qk_rope_head_dim")) + latent * (plain + value)
    return AttentionProducts(queries + keys + value * hidden, query + value)


def flops_per_token(
    architecture: Architecture,
    sequence_length: int,
    *,
    num_mlp_matrices: int,
    of_attention: Callable[[Architecture], AttentionProducts] = attention_products,
) -> int:
    """Floating-point operations of one token in the forward and backward pass."""
    assert architecture.vocab_size is not None, "fill in vocab_size before counting"
    hidden = architecture.hidden_size
    mlp = num_mlp_matrices * hidden * architecture.intermediate_size
    layers = range(architecture.mtp_layers.stop)
    seen = sum(min(sequence_length, architecture.window(n) or sequence_length) for n in layers)
    attention = of_attention(architecture)
    multiply_adds = len(layers) * (attention.of_token + mlp) + seen * attention.of_pair
    num_outputs = 1 + architecture.num_mtp_layers
    multiply_adds += num_outputs * hidden * architecture.vocab_size
    multiply_adds += architecture.num_mtp_layers * 2 * hidden * hidden  # both inputs as one
    return 3 * 2 * multiply_adds


def flops_per_token_of_experts(
    architecture: Architecture,
    sequence_length: int,
    *,
    of_attention: Callable[[Architecture], AttentionProducts] = attention_products,
) -> int:
    """`flops_per_token` with routers, and the experts that a token uses."""
    without = flops_per_token(
        architecture, sequence_length, num_mlp_matrices=0, of_attention=of_attention
    )
    num_mixtures = len(architecture.expert_layers)
    num_dense = architecture.mtp_layers.stop - num_mixtures
    widths: int = num_mixtures * (
        architecture.setting("num_experts") + 3 * architecture.used_mlp_size
    )
    widths += num_dense * 3 * architecture.intermediate_size
    return without + 3 * 2 * architecture.hidden_size * widths


def flops_per_encoder_token(
    architecture: Architecture, sequence_length: int, decoder_length: int, *, num_mlp_matrices: int
) -> int:
    """Floating-point operations of a sample of an encoder-decoder, by tokens of the encoder."""
    assert architecture.vocab_size is not None, "fill in vocab_size before counting"
    hidden, query = architecture.hidden_size, architecture.query_size
    key_value = architecture.key_value_size
    mlp = num_mlp_matrices * hidden * architecture.intermediate_size
    layer = 2 * hidden * (query + key_value) + mlp
    encoder = sequence_length * (layer + 2 * sequence_length * query)
    of_decoder_token = layer + 2 * hidden * query + 2 * (decoder_length + sequence_length) * query
    decoder = decoder_length * of_decoder_token + sequence_length * 2 * hidden * key_value
    multiply_adds = architecture.num_hidden_layers * encoder
    multiply_adds += architecture.setting("num_decoder_layers") * decoder
    multiply_adds += decoder_length * hidden * architecture.vocab_size
    return 3 * 2 * multiply_adds // sequence_length
