"""Memory and arithmetic of a `biencoder`: activations that a layer saves, FLOPs per token."""

from tokamake.config.architecture import Architecture
from tokamake.models.common import costs

saved_activations = costs.plain_layer


def flops_per_token(architecture: Architecture, sequence_length: int, block_length: int) -> int:
    """Floating-point operations of a query and its block, both ways, by tokens of the query.

    Projections and scores, products per sample, are left out.
    """
    assert architecture.vocab_size is not None
    of_logits = 3 * 2 * architecture.hidden_size * architecture.vocab_size
    query, block = (
        length * (costs.flops_per_token(architecture, length, num_mlp_matrices=2) - of_logits)
        for length in (sequence_length, block_length)
    )
    return (query + block) // sequence_length
