"""Floating-point operations of a transformer, counted as PaLM does (arXiv 2204.02311, appendix B).

Only matrix products count, with two operations per multiply-add. The backward pass takes twice
the forward pass. Attention counts the whole sequence, as if it were not causal. The embedding is a
look-up and free; the output layer is a product.
"""

from tokamake.config.architecture import Architecture


def per_token(architecture: Architecture, sequence_length: int, *, num_mlp_matrices: int) -> int:
    """Floating-point operations of one token in the forward and backward pass."""
    assert architecture.vocab_size is not None, "fill in vocab_size before counting"
    hidden = architecture.hidden_size
    projections = 2 * hidden * (architecture.query_size + architecture.key_value_size)
    mlp = num_mlp_matrices * hidden * architecture.intermediate_size
    scores_and_values = 2 * sequence_length * architecture.query_size
    layer = projections + mlp + scores_and_values
    multiply_adds = architecture.num_hidden_layers * layer + hidden * architecture.vocab_size
    return 3 * 2 * multiply_adds


def per_encoder_token(
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
