"""Names of tensors in megatron.core, by the names of Megatron's classic model."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tokamake import plugins
from tokamake.config.architecture import Architecture
from tokamake.errors import UserError

_CORE_NAMES = (
    (r"^language_model\.(embedding|output_layer|mtp)\.", r"\1."),
    (r"^word_embeddings_for_head\.", "output_layer."),
    (r"^language_model\.pooler\.", "pooler."),
    (r"^lm_head\.layernorm\.", "lm_head.layer_norm."),
    (r"^lm_head\.bias$", "output_layer.bias"),
    (r"\bpost_attention_layernorm\.", "mlp.linear_fc1.layer_norm_"),
    (r"\bself_attention\.query_key_value\.", "self_attention.linear_qkv."),
    (r"\bself_attention\.dense\.", "self_attention.linear_proj."),
    (r"\bmlp\.dense_h_to_4h\.", "mlp.linear_fc1."),
    (r"\bmlp\.dense_4h_to_h\.", "mlp.linear_fc2."),
)
"""Patterns of classic names, and megatron.core's names in checkpoints."""
_FUSED_NORMS = ((r"\binput_layernorm\.", "self_attention.linear_qkv.layer_norm_"),)
_FUSED_LATENT_NORMS = ((r"\b(q|kv)_layernorm\.", r"linear_\1_up_proj.layer_norm_"),)
"""Norms that Transformer Engine fuses with the projection that follows them, in layers with latent
attention and others."""
_DECODER = r"^language_model\.(decoder\.layers\.\d+\.)"
_EXPERT_KEYS = ((r"\bpre_mlp_layernorm\.", "mlp.linear_fc1.layer_norm_"),)
_LATENT_KEYS = (
    (r"\blinear_(q|kv)_up_proj\.layer_norm_", r"\1_layernorm."),
    (r"\bmlp\.linear_fc1\.layer_norm_", "pre_mlp_layernorm."),
)
"""`SECOND_KEYS` of families with experts: names of norms without Transformer Engine."""
_CORE_DECODER_NAMES = (
    (_DECODER + r"post_attention_layernorm\.", r"\1pre_cross_attn_layernorm."),
    (_DECODER + r"inter_attention\.query\.", r"\1cross_attention.linear_q."),
    (_DECODER + r"inter_attention\.key_value\.", r"\1cross_attention.linear_kv."),
    (_DECODER + r"inter_attention\.dense\.", r"\1cross_attention.linear_proj."),
    (_DECODER + r"post_inter_attention_layernorm\.", r"\1mlp.linear_fc1.layer_norm_"),
    (r"^language_model\.decoder\.", "decoder."),
)
"""Names of a decoder beside an encoder; they come first."""


def family_constant(architecture: Architecture, name: str, *, default: Any) -> Any:
    """Constant of a family's megatron.py that most families lack."""
    return getattr(plugins.load("models/*/megatron", architecture.family), name, default)


def stack_of(architecture: Architecture) -> str:
    """Return megatron.core's name of the stack of layers."""
    name: str = family_constant(architecture, "STACK", default="decoder")
    if not name:
        raise UserError(
            f"format: megatron.core has no model of family {architecture.family}; choose the "
            "format megatron, mds, universal, hf or native"
        )
    return name


def layers_differ(architecture: Architecture) -> bool:
    """Return whether distributed checkpoints have each layer by itself."""
    differ: bool = family_constant(architecture, "LAYERS_DIFFER", default=False)
    return differ or architecture.expert_layers.start > 0


def second_keys(architecture: Architecture, keys: Iterable[str]) -> dict[str, str]:
    """Return the further keys of tensors that megatron.core has under two keys, with the first."""
    patterns = family_constant(architecture, "SECOND_KEYS", default=())
    if architecture.has_routers:
        patterns = _LATENT_KEYS if architecture.latent_size else _EXPERT_KEYS
    return {
        re.sub(pattern, replacement, key): key
        for key in keys
        for pattern, replacement in patterns
        if re.search(pattern, key)
    }


def core_name(name: str, architecture: Architecture) -> str:
    """Return megatron.core's name of a tensor, as checkpoints have it."""
    name = re.sub(r"^language_model\.encoder\.", f"{stack_of(architecture)}.", name)
    own = family_constant(architecture, "CORE_NAMES", default=())
    norms = _FUSED_LATENT_NORMS if architecture.latent_size else _FUSED_NORMS
    for pattern, replacement in (*own, *_CORE_DECODER_NAMES, *norms, *_CORE_NAMES):
        name = re.sub(pattern, replacement, name)
    return name


def as_stored(tree: Any, architecture: Architecture) -> Any:
    """Return the tensors of a stage as classic checkpoints of a family nest them.

    megatron.core's models, which some families alone have, nest none.
    """
    if not family_constant(architecture, "IS_CORE", default=False):
        return tree
    return {core_name(name, architecture): tensor for name, tensor in _leaves(tree)}


def _leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
