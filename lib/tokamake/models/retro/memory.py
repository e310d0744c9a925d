"""Memory and arithmetic of a `retro`: activations that layers save, FLOPs per token."""

from tokamake import plugins
from tokamake.config.architecture import Architecture
from tokamake.models.common import costs
from tokamake.models.common.costs import SavedActivations
from tokamake.models.retro.hf import decoder_of


def saved_activations(
    architecture: Architecture, *, size: int, fused_norm: bool
) -> SavedActivations:
    """Bytes per token of a layer without cross-attention."""
    family = plugins.load("models/*/memory", architecture.setting("decoder"))
    saved: SavedActivations = family.saved_activations(
        architecture, size=size, fused_norm=fused_norm
    )
    return saved


def saved_with_cross_attention(
    architecture: Architecture, *, size: int, fused_norm: bool, attended_tokens: float
) -> SavedActivations:
    """Bytes per token of a layer with cross-attention.

    Args:
        attended_tokens: tokens whose keys and values it has, for each of its own tokens.
    """
    return costs.decoder_layer(
        architecture,
        size=size,
        fused_norm=fused_norm,
        encoder_tokens=attended_tokens,
        of_layer=saved_activations,
    )


def flops_per_token(
    architecture: Architecture, sequence_length: int, *neighbor_lengths: int
) -> int:
    """Floating-point operations of a sample, both ways, by tokens of the decoder.

    Args:
        neighbor_lengths: tokens of each neighbor of the sample's chunks, all alike.
    """
    decoder = decoder_of(architecture)
    family = plugins.load("models/*/memory", decoder.family)
    total: int = sequence_length * family.flops_per_token(decoder, sequence_length)
    if not neighbor_lengths:
        return total // sequence_length
    assert architecture.vocab_size is not None
    hidden, query = architecture.hidden_size, architecture.query_size
    key_value, chunk = architecture.key_value_size, architecture.setting("chunk_length")
    of_output = hidden * architecture.vocab_size
    layer = family.flops_per_token(decoder, 0) // 6 - of_output
    layer //= architecture.num_hidden_layers
    number, (length, *_) = len(neighbor_lengths), neighbor_lengths
    tokens, attended = number * length, number * length * chunk // sequence_length
    cross = 2 * hidden * (sequence_length * query + tokens * key_value)
    cross += 2 * sequence_length * attended * query
    encoder = tokens * (layer + 2 * length * query) * architecture.setting("num_encoder_layers")
    reading = 2 * hidden * (tokens * query + number * chunk * key_value)
    reading += 2 * tokens * chunk * query
    multiply_adds = len(architecture.retrieval_layers) * cross + encoder + reading
    return (total + 3 * 2 * multiply_adds) // sequence_length
