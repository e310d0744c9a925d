"""Names and shapes of a model's tensors, under the names of Hugging Face's Llama.

Tests compare them with the parameters of the family's `Model`, in their order.
"""

import re
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from tokamake.config.architecture import Architecture

Shapes = dict[str, tuple[int, ...]]
ROUTER_BIAS = "e_score_correction_bias"
"""Bias of a router that balances the experts: no gradient changes it."""
_MIDDLE, _LAST = ("post_attention_layernorm",), ("post_feedforward_layernorm",)
_NORMS = {
    "before": (("input_layernorm",), _MIDDLE, ()),
    "after": ((), _MIDDLE, _LAST),
    "both": (("input_layernorm",), (*_MIDDLE, "pre_feedforward_layernorm"), _LAST),
}
"""Norms of a layer before attention, between it and the MLP, and after the MLP."""


def _none(_: Architecture) -> Shapes:
    return {}


class LayerForm(NamedTuple):
    """How the layers of a family differ from a Llama's."""

    norms: Literal["before", "after", "both"] = "before"
    """Whether a layer norms the inputs of attention and MLP, their results, or both."""
    qkv_bias: bool | None = None
    """Whether queries, keys and values have biases; None: as `attention_bias` says."""
    of_attention: Callable[[Architecture], Shapes] = _none
    """Further tensors of attention."""
    attention: Callable[[Architecture], Shapes] | None = None
    """Tensors of attention of another kind; None: the usual projections."""


_USUAL = LayerForm()


def all_head_norms(architecture: Architecture) -> Shapes:
    """Shapes of one norm over all query heads, and one over all key heads."""
    return {
        "self_attn.q_norm.weight": (architecture.query_size,),
        "self_attn.k_norm.weight": (architecture.key_value_size,),
    }


def shapes(
    architecture: Architecture,
    *,
    gated: bool,
    biased_norms: bool,
    form: LayerForm = _USUAL,
    of_mlp: Callable[[Architecture], Shapes] | None = None,
    of_embeddings: Callable[[Architecture], Shapes] = _none,
    of_heads: Callable[[Architecture], Shapes] = _none,
) -> Shapes:
    """Shape of every tensor by its name.

    Args:
        of_mlp: of a layer's MLP, such as experts; None: the projections of a dense one. The first
            `first_k_dense_replace` layers have a dense one.
    """
    hidden = architecture.hidden_size
    first, middle, last = (
        _norms(names, hidden, biased=biased_norms) for names in _NORMS[form.norms]
    )
    attention = first | (
        form.attention(architecture)
        if form.attention
        else _attention(architecture, qkv_bias=form.qkv_bias)
    )
    attention |= form.of_attention(architecture) | middle
    dense = attention | _mlp(architecture, gated=gated) | last
    others = attention | of_mlp(architecture) | last if of_mlp else dense
    num_dense = (architecture.model_extra or {}).get("first_k_dense_replace", 0)
    num_others = architecture.num_hidden_layers - num_dense
    further = others | _mtp(hidden)
    layers = [dense] * num_dense + [others] * num_others
    tensors = _layers("model", layers + [further] * architecture.num_mtp_layers)
    tensors |= _embeddings(architecture) | of_embeddings(architecture)
    tensors |= with_bias("model.norm", (hidden,), has_bias=biased_norms)
    if not architecture.tie_word_embeddings:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    return tensors | of_heads(architecture)


def _mtp(hidden: int) -> Shapes:
    """Further tensors of a layer that predicts further tokens."""
    return {
        "enorm.weight": (hidden,),
        "hnorm.weight": (hidden,),
        "eh_proj.weight": (hidden, 2 * hidden),
        "shared_head.norm.weight": (hidden,),
    }


def _norms(names: tuple[str, ...], width: int, *, biased: bool) -> Shapes:
    tensors: Shapes = {}
    for name in names:
        tensors |= with_bias(name, (width,), has_bias=biased)
    return tensors


def encoder_decoder_shapes(
    architecture: Architecture,
    *,
    gated: bool,
    biased_norms: bool,
    of_embeddings: Callable[[Architecture], Shapes] = _none,
    of_heads: Callable[[Architecture], Shapes] = _none,
) -> Shapes:
    """Shape of every tensor of an encoder-decoder by its name; see `shapes` for the arguments."""
    hidden = architecture.hidden_size
    attention = with_bias("input_layernorm", (hidden,), has_bias=biased_norms)
    attention |= _attention(architecture)
    cross = {
        re.sub("^(input|self_attn)", "cross_attn", name): shape for name, shape in attention.items()
    }
    mlp = with_bias("post_attention_layernorm", (hidden,), has_bias=biased_norms)
    mlp |= _mlp(architecture, gated=gated)
    norm = with_bias("norm", (hidden,), has_bias=biased_norms)
    tensors: Shapes = {}
    for stack, layer, number in (
        ("model.encoder", attention | mlp, architecture.num_hidden_layers),
        ("model.decoder", attention | cross | mlp, architecture.setting("num_decoder_layers")),
    ):
        tensors |= _layers(stack, [layer] * number)
        tensors |= {f"{stack}.{name}": shape for name, shape in norm.items()}
    tensors |= _embeddings(architecture) | of_embeddings(architecture)
    if not architecture.tie_word_embeddings:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    return tensors | of_heads(architecture)


def _embeddings(architecture: Architecture) -> Shapes:
    """Embeddings of tokens and of learned positions."""
    assert architecture.vocab_size is not None, "fill in vocab_size before asking for shapes"
    hidden = architecture.hidden_size
    tensors: Shapes = {"model.embed_tokens.weight": (architecture.vocab_size, hidden)}
    if architecture.position_embedding == "learned":
        longest = architecture.max_position_embeddings
        tensors["model.embed_positions.weight"] = (longest, hidden)
    return tensors


def _layers(stack: str, layers: Sequence[Shapes]) -> Shapes:
    return {
        f"{stack}.layers.{index}.{name}": shape
        for index, layer in enumerate(layers)
        for name, shape in layer.items()
    }


def _attention(architecture: Architecture, *, qkv_bias: bool | None = None) -> Shapes:
    hidden, query = architecture.hidden_size, architecture.query_size
    key_value = (architecture.key_value_size, hidden)
    projections = {"q": (query, hidden), "k": key_value, "v": key_value, "o": (hidden, query)}
    tensors: Shapes = {}
    if architecture.attention_sinks:
        tensors["self_attn.sinks"] = (architecture.num_attention_heads,)
    for name, shape in projections.items():
        has_bias = architecture.attention_bias if name == "o" or qkv_bias is None else qkv_bias
        tensors |= with_bias(f"self_attn.{name}_proj", shape, has_bias=has_bias)
    return tensors


def _mlp(architecture: Architecture, *, gated: bool) -> Shapes:
    hidden, inner = architecture.hidden_size, architecture.intermediate_size
    projections = {"gate": (inner, hidden)} if gated else {}
    projections |= {"up": (inner, hidden), "down": (hidden, inner)}
    tensors: Shapes = {}
    for name, shape in projections.items():
        tensors |= with_bias(f"mlp.{name}_proj", shape, has_bias=architecture.mlp_bias)
    return tensors


def head_norms(architecture: Architecture) -> Shapes:
    """Shapes of the norms of query and key heads."""
    return {f"self_attn.{each}_norm.weight": (architecture.head_dim,) for each in "qk"}


def latent_attention(architecture: Architecture) -> Shapes:
    """Shapes of latent attention (MLA)."""
    hidden, has_bias, own = (
        architecture.hidden_size,
        architecture.attention_bias,
        architecture.setting,
    )
    query, latent = architecture.query_size, own("kv_lora_rank")
    tensors: Shapes = {}
    if rank := own("q_lora_rank"):
        tensors |= with_bias("self_attn.q_a_proj", (rank, hidden), has_bias=has_bias)
        tensors["self_attn.q_a_layernorm.weight"] = (rank,)
        tensors["self_attn.q_b_proj.weight"] = (query, rank)
    else:
        tensors["self_attn.q_proj.weight"] = (query, hidden)
    compressed = latent + own("qk_rope_head_dim"), hidden
    tensors |= with_bias("self_attn.kv_a_proj_with_mqa", compressed, has_bias=has_bias)
    tensors["self_attn.kv_a_layernorm.weight"] = (latent,)
    width = own("qk_nope_head_dim") + own("v_head_dim")
    tensors["self_attn.kv_b_proj.weight"] = (architecture.num_attention_heads * width, latent)
    output = hidden, architecture.value_size
    return tensors | with_bias("self_attn.o_proj", output, has_bias=has_bias)


def expert_shapes(architecture: Architecture, *, form: LayerForm = _USUAL) -> Shapes:
    """`shapes` of a family with RMSNorms and mixtures of experts."""
    return shapes(architecture, gated=True, biased_norms=False, form=form, of_mlp=_experts)


def _experts(architecture: Architecture) -> Shapes:
    """Shapes of a router and its experts: stacks of matrices, (experts, outputs, inputs)."""
    hidden, inner = architecture.hidden_size, architecture.expert_size
    number = architecture.setting("num_experts")
    shared = (architecture.model_extra or {}).get("n_shared_experts", 0) * inner
    has_bias = architecture.mlp_bias
    tensors = with_bias("mlp.gate", (number, hidden), has_bias=has_bias)
    tensors |= {f"mlp.gate.{ROUTER_BIAS}": (number,)} if architecture.has_router_biases else {}
    for each, rows, columns in (
        ("gate", inner, hidden),
        ("up", inner, hidden),
        ("down", hidden, inner),
    ):
        tensors[f"mlp.experts.{each}_proj.weight"] = (number, rows, columns)
        tensors |= {f"mlp.experts.{each}_proj.bias": (number, rows)} if has_bias else {}
    if shared:
        tensors |= {
            "mlp.shared_experts.gate_proj.weight": (shared, hidden),
            "mlp.shared_experts.up_proj.weight": (shared, hidden),
            "mlp.shared_experts.down_proj.weight": (hidden, shared),
        }
    return tensors


def with_bias(module: str, shape: tuple[int, ...], *, has_bias: bool) -> Shapes:
    """Shapes of the weight of a module and, if it has one, of its bias."""
    weight = {f"{module}.weight": shape}
    return {**weight, f"{module}.bias": shape[:1]} if has_bias else weight
