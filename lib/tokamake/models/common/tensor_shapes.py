"""Names and shapes of the tensors of a model, by Hugging Face's names of Llama.

Tests see that they are those of the family's `Model`, in its order.
"""

from collections.abc import Iterator

from tokamake.config.architecture import Architecture

Shapes = dict[str, tuple[int, ...]]


def shapes(architecture: Architecture, *, gated: bool, biased_norms: bool) -> Shapes:
    """Shape of every tensor by its name.

    Args:
        architecture: shape of the model, vocab_size filled in.
        gated: whether the MLP has a gate.
        biased_norms: whether norms have biases.
    """
    hidden, vocabulary = architecture.hidden_size, architecture.vocab_size
    assert vocabulary is not None, "fill in vocab_size before asking for shapes"
    found: Shapes = {}
    for number in range(architecture.num_hidden_layers):
        layer = _layer(architecture, gated=gated, biased_norms=biased_norms)
        found |= {f"model.layers.{number}.{name}": shape for name, shape in layer}
    found["model.embed_tokens.weight"] = (vocabulary, hidden)
    if architecture.position_embedding == "learned":
        found["model.embed_positions.weight"] = (architecture.max_position_embeddings, hidden)
    if architecture.embedding_layernorm:
        found |= _with_bias("model.embed_layernorm", (hidden,), biased_norms)
    found |= _with_bias("model.norm", (hidden,), biased_norms)
    if not architecture.tie_word_embeddings:
        found["lm_head.weight"] = (vocabulary, hidden)
    return found


def _layer(
    architecture: Architecture, *, gated: bool, biased_norms: bool
) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = architecture.hidden_size, architecture.intermediate_size
    query, key_value = architecture.query_size, architecture.key_value_size
    attention = {"q": (query, hidden), "k": (key_value, hidden), "v": (key_value, hidden)}
    mlp = {"gate": (inner, hidden)} if gated else {}
    yield from _with_bias("input_layernorm", (hidden,), biased_norms).items()
    for name, shape in {**attention, "o": (hidden, query)}.items():
        yield from _with_bias(f"self_attn.{name}_proj", shape, architecture.attention_bias).items()
    yield from _with_bias("post_attention_layernorm", (hidden,), biased_norms).items()
    for name, shape in {**mlp, "up": (inner, hidden), "down": (hidden, inner)}.items():
        yield from _with_bias(f"mlp.{name}_proj", shape, architecture.mlp_bias).items()


def _with_bias(module: str, shape: tuple[int, ...], has_bias: bool) -> Shapes:
    weight = {f"{module}.weight": shape}
    return {**weight, f"{module}.bias": shape[:1]} if has_bias else weight
