"""A `retro` in the terms of megatron.core 0.15, the last version with it: modules, arguments.

Modules of cross-attention and of the encoder keep megatron.core's names, which layers of other
families do not have.
"""

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from tokamake import plugins
from tokamake.config.architecture import Architecture
from tokamake.config.retrieval_layers import published_retrieval_layer
from tokamake.errors import UserError
from tokamake.models.common.megatron_format import (
    ATTENTION,
    INPUT_NORM,
    MLP_NORM,
    MegatronModule,
    first,
)
from tokamake.models.retro.hf import decoder_of

PROGRAMS = ("pretrain_retro",)

ARGUMENTS = {"retro_add_retriever": True}

TENSORS = ("language_model.encoder.layers.*.cross_attention.attn.linear_q.weight",)

EMBEDDING = {
    "word_embeddings.norm": "model.embed_layernorm",
    "position_embeddings": "model.embed_positions",
}

IS_CORE = True
"""Megatron has no other names for its tensors than megatron.core's."""

LAYERS_DIFFER = True
"""Layers have different tensors, so that each is stored for itself."""

CORE_NAMES = ((r"\bpost_attention_layernorm\.norm\.", "pre_mlp_layernorm.norm."),)

_QKV, _OUTPUT = ATTENTION
# In the order in which megatron.core makes them; optimizers keep it.
_ATTENTION = (_OUTPUT, INPUT_NORM, _QKV)
_CROSS_ATTENTION = (
    MegatronModule("pre_cross_attn_layernorm", ("cross_attn_layernorm",)),
    MegatronModule("cross_attention.attn.linear_proj", ("cross_attn.o_proj",), "columns"),
    MegatronModule("cross_attention.attn.linear_q", ("cross_attn.q_proj",), "rows"),
    MegatronModule(
        "cross_attention.attn.linear_kv", ("cross_attn.k_proj", "cross_attn.v_proj"), "heads"
    ),
)
_FINAL_NORM = "language_model.encoder.final_layernorm.weight"


def layer(architecture: Architecture, number: int) -> tuple[MegatronModule, ...]:
    """Modules of a layer, in Megatron's order."""
    of_decoder = plugins.load("models/*/megatron", architecture.setting("decoder")).LAYER
    mlp = of_decoder[1 + len(ATTENTION) :]
    whole = (*_ATTENTION, *mlp)
    if number not in (retrieving := architecture.retrieval_layers):
        return whole
    encoder: list[MegatronModule] = []
    if number == retrieving[0]:
        # The first layer's norm before the MLP is wrapped.
        wrapped = (MLP_NORM._replace(name=f"{MLP_NORM.name}.norm"), *mlp[1:])
        encoder += _within_encoder((*_ATTENTION, *_CROSS_ATTENTION, *wrapped), 0)
        for place in range(1, architecture.setting("num_encoder_layers")):
            encoder += _within_encoder(whole, place)
    return (*_ATTENTION, *_CROSS_ATTENTION, *encoder, *mlp)


def _within_encoder(modules: Iterable[MegatronModule], number: int) -> list[MegatronModule]:
    ours = f"encoder.layers.{number}."
    return [
        module._replace(
            name=f"cross_attention.{ours}{module.name}",
            ours=tuple(f"{ours}{name}" for name in module.ours),
        )
        for module in modules
    ]


def fields(args: Any, file: Path, *, is_core: bool) -> dict[str, Any]:
    """Fields of an `Architecture` that Megatron's arguments state."""
    decoder = "llama" if getattr(args, "swiglu", False) else "gpt"
    of_decoder = plugins.load("models/*/megatron", decoder).fields(args, file, is_core=is_core)
    if getattr(args, "retro_attention_gate", 1) not in (None, 1, 1.0):
        raise UserError(
            f"{file}: args.retro_attention_gate: {args.retro_attention_gate!r}: scales "
            "cross-attention, which the family retro does not; give a checkpoint without"
        )
    rates = {
        f"encoder_{kind}_dropout": first(args, f"retro_encoder_{kind}_dropout")
        for kind in ("hidden", "attention")
    }
    return {
        **of_decoder,
        "decoder": decoder,
        "chunk_length": first(args, "retro_chunk_length", "retro_gpt_chunk_length") or 64,
        "num_encoder_layers": first(args, "retro_encoder_layers", "retro_encoder_num_layers") or 2,
        **{name: 0.1 if rate is None else float(rate) for name, rate in rates.items()},
    }


def fields_of_tensors(names: Collection[str]) -> dict[str, Any]:
    """Fields of an `Architecture` that the names of tensors show."""
    return {"final_norm": _FINAL_NORM in names}


def arguments(architecture: Architecture) -> dict[str, Any]:
    """Megatron's arguments of an architecture; the inverse of `fields`."""
    of_decoder = plugins.load("models/*/megatron", architecture.setting("decoder"))
    return {
        **of_decoder.ARGUMENTS,
        **of_decoder.arguments(decoder_of(architecture)),
        "retro_chunk_length": architecture.setting("chunk_length"),
        "retro_encoder_layers": architecture.setting("num_encoder_layers"),
        "retro_encoder_hidden_dropout": architecture.setting("encoder_hidden_dropout"),
        "retro_encoder_attention_dropout": architecture.setting("encoder_attention_dropout"),
    }


def inexpressible(architecture: Architecture, *, is_megatron_lm: bool) -> list[str]:
    """Settings for which Megatron-LM or Megatron-DeepSpeed has no argument."""
    of_decoder = plugins.load("models/*/megatron", architecture.setting("decoder"))
    settings: list[str] = of_decoder.inexpressible(
        decoder_of(architecture), is_megatron_lm=is_megatron_lm
    )
    if not is_megatron_lm:
        return [*settings, "retro"]
    number = architecture.num_hidden_layers
    if architecture.retrieval_layers != range(published_retrieval_layer(number) - 1, number, 3):
        settings.append("first_retrieval_layer and retrieval_interval")
    if architecture.setting("final_norm"):
        settings.append("final_norm")
    return settings
