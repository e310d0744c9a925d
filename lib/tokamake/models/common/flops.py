"""Floating-point operations of a decoder, for the speed of training in FLOP/s."""

from tokamake.config.architecture import Architecture


def per_token(architecture: Architecture, sequence_length: int, *, num_mlp_matrices: int) -> int:
    """Floating-point operations of one token's forward and backward pass.

    Counts matrix products alone, two operations a multiply-add, backward twice the forward, and
    attention over the whole sequence as if it were not causal: the accounting of PaLM (arXiv
    2204.02311, appendix B). The embedding is a look-up and free; the output layer is a product.

    Args:
        architecture: shape of the model.
        sequence_length: tokens of a sample.
        num_mlp_matrices: matrices of hidden_size × intermediate_size in each layer.
    """
    assert architecture.vocab_size is not None, "fill in vocab_size before counting"
    hidden = architecture.hidden_size
    key_value = architecture.num_key_value_heads * architecture.head_dim
    projections = 2 * hidden * hidden + 2 * hidden * key_value
    mlp = num_mlp_matrices * hidden * architecture.intermediate_size
    scores_and_values = 2 * sequence_length * hidden
    layer = projections + mlp + scores_and_values
    multiply_adds = architecture.num_hidden_layers * layer + hidden * architecture.vocab_size
    return 3 * 2 * multiply_adds
