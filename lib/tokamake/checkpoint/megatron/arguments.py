"""Megatron's arguments in a checkpoint: what they say of a model and of a run.

Checkpoints that tokamake wrote have the whole architecture in `args.tokamake`; of others it is put
together from the arguments of Megatron-LM and its kin.
"""

import argparse
from pathlib import Path
from typing import Any

from tokamake.checkpoint.opened import Layout, Opened, Progress, Target
from tokamake.config import Architecture
from tokamake.errors import UserError
from tokamake.validation import validate

_POSITIONS = {"learned": "absolute", "rotary": "rotary", "alibi": "alibi"}
"""position_embedding and Megatron's position_embedding_type."""


def arguments(checkpoint: Opened, layout: Layout, *, padded_vocab_size: int) -> argparse.Namespace:
    """Arguments that describe a model and how its checkpoint's files are to part it."""
    architecture, progress = checkpoint.architecture, checkpoint.progress
    found = of_model(architecture, progress.consumed_tokens, padded_vocab_size=padded_vocab_size)
    found.eos_token_id = checkpoint.notes.get("eos_token_id")
    stages = layout.pipeline_parallel_size
    found.tensor_model_parallel_size = layout.tensor_parallel_size
    found.pipeline_model_parallel_size = stages
    found.no_pipeline_parallel = stages == 1
    found.consumed_train_samples = progress.consumed_samples
    if layout.virtual_pipeline_size > 1:
        per_stage = architecture.num_hidden_layers // (stages * layout.virtual_pipeline_size)
        found.virtual_pipeline_model_parallel_size = layout.virtual_pipeline_size
        found.num_layers_per_virtual_pipeline_stage = per_stage
    return found


def of_model(
    architecture: Architecture, tokens: int, *, padded_vocab_size: int
) -> argparse.Namespace:
    """Megatron's arguments that describe a model; ours lie whole in `tokamake`.

    Args:
        architecture: shape of the model, vocab_size filled in.
        tokens: tokens trained on.
        padded_vocab_size: rows of the stored embedding.
    """
    shape = architecture
    rotary, llama = shape.position_embedding == "rotary", shape.family == "llama"
    return argparse.Namespace(
        num_layers=shape.num_hidden_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.intermediate_size,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        kv_channels=shape.head_dim,
        max_position_embeddings=shape.max_position_embeddings,
        seq_length=shape.max_position_embeddings,
        vocab_size=shape.vocab_size,
        padded_vocab_size=padded_vocab_size,
        make_vocab_size_divisible_by=Target.make_vocab_size_divisible_by,
        untie_embeddings_and_output_weights=not shape.tie_word_embeddings,
        add_position_embedding=shape.position_embedding == "learned",
        use_rotary_position_embeddings=rotary,
        position_embedding_type=_POSITIONS[shape.position_embedding],
        rotary_percent=1.0,
        rope_theta=shape.rope_theta,
        embed_layernorm=shape.embedding_layernorm,
        normalization="rmsnorm" if llama else "layernorm",
        layernorm_epsilon=shape.rms_norm_eps if llama else shape.layer_norm_epsilon,
        swiglu=llama,
        add_bias_linear=shape.attention_bias and shape.mlp_bias,
        init_method_std=shape.initializer_range,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        no_pipeline_parallel=True,
        consumed_train_tokens=tokens,
        tokamake=shape.model_dump(),
    )


def as_megatron_lm(args: argparse.Namespace) -> argparse.Namespace:
    """Add what Megatron-LM calls by other names than Megatron-DeepSpeed."""
    args.group_query_attention = args.num_key_value_heads != args.num_attention_heads
    args.num_query_groups = args.num_key_value_heads
    args.normalization = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}[args.normalization]
    args.norm_epsilon = args.layernorm_epsilon
    args.rotary_base = args.rope_theta
    kinds = {"absolute": "learned_absolute", "rotary": "rope"}
    args.position_embedding_type = kinds.get(
        args.position_embedding_type, args.position_embedding_type
    )
    return args


def architecture_of(args: Any, file: Path, *, padded_vocab_size: int) -> Architecture:
    """Shape of the model.

    Args:
        args: of the checkpoint.
        file: that they are in, for messages.
        padded_vocab_size: rows of the stored embedding, for a true size may not be known.

    Raises:
        UserError: an argument is missing, or the model is none that we have.
    """
    described = getattr(args, "tokamake", None)
    if described is not None:
        return validate(Architecture, described, f"{file}: args.tokamake")
    values = _shape(args, file)
    size = getattr(args, "vocab_size", None)
    if size and getattr(args, "tokenizer_type", None) == "NullTokenizer":
        size += 1  # Megatron counts the token that ends documents apart there.
    values["vocab_size"] = size if size and size <= padded_vocab_size else padded_vocab_size
    return validate(Architecture, values, f"{file}: args")


def _shape(args: Any, file: Path) -> dict[str, Any]:
    heads = _needed(args, "num_attention_heads", file)
    gated = bool(_first(args, "swiglu", "glu_activation"))
    values = {
        "family": "llama" if gated else "gpt",
        "hidden_size": _needed(args, "hidden_size", file),
        "intermediate_size": _needed(args, "ffn_hidden_size", file),
        "num_hidden_layers": _needed(args, "num_layers", file),
        "num_attention_heads": heads,
        "num_key_value_heads": _groups(args) or heads,
        "max_position_embeddings": _needed(args, "max_position_embeddings", file),
        "position_embedding": _positions(args),
        "tie_word_embeddings": not getattr(args, "untie_embeddings_and_output_weights", False),
        "initializer_range": _first(args, "init_method_std") or 0.02,
    }
    if values["position_embedding"] == "rotary":
        values["rope_theta"] = float(_first(args, "rope_theta", "rotary_base") or 10000.0)
    epsilon = _first(args, "layernorm_epsilon", "norm_epsilon") or 1e-5
    values["rms_norm_eps" if gated else "layer_norm_epsilon"] = epsilon
    biased = getattr(args, "add_bias_linear", not gated)
    values |= {"attention_bias": biased, "mlp_bias": biased}
    if not gated:
        values["embedding_layernorm"] = bool(getattr(args, "embed_layernorm", False))
    return values


def _needed(args: Any, name: str, file: Path) -> Any:
    value = getattr(args, name, None)
    if value is None:
        raise UserError(f"{file}: args.{name}: missing; give a checkpoint that Megatron wrote")
    return value


def _first(args: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(args, name, None))), None)


def _groups(args: Any) -> int | None:
    """Heads of keys and values, as Megatron-DeepSpeed, BigCode's Megatron or Megatron-LM say it."""
    if getattr(args, "attention_head_type", None) == "multiquery":
        return 1
    named = _first(args, "num_key_value_heads")
    if named is None and getattr(args, "group_query_attention", False):
        named = _first(args, "num_query_groups")
    return None if named is None else int(named)


def _positions(args: Any) -> str:
    kind = str(getattr(args, "position_embedding_type", None)).rpartition(".")[2]
    if getattr(args, "use_rotary_position_embeddings", False) or kind in ("rotary", "rope"):
        return "rotary"
    return "alibi" if kind == "alibi" else "learned"


def notes_of(args: Any) -> dict[str, Any]:
    """What else is known of a model: the token that ends a text, where tokamake has kept it."""
    token = getattr(args, "eos_token_id", None)
    return {} if token is None else {"eos_token_id": token}


def check_sizes(args: Any, folder: Path, *, tensor: int, pipeline: int) -> None:
    """See that there are files of as many ranks as the arguments say.

    Raises:
        UserError: there are not.
    """
    for name, found in (("tensor", tensor), ("pipeline", pipeline)):
        said = getattr(args, f"{name}_model_parallel_size", None)
        if said not in (None, found):
            raise UserError(
                f"{folder}: has files of {found} {name}-parallel ranks, its arguments say {said}; "
                "are all files of the checkpoint there?"
            )


def progress_of(state: Any) -> Progress:
    """How far the run of a checkpoint's state has come."""
    args = state.get("args")
    samples = getattr(args, "consumed_train_samples", None) or state.get("global_samples") or 0
    tokens = getattr(args, "consumed_train_tokens", None) or state.get("tokens") or 0
    return Progress(int(state.get("iteration") or 0), int(samples), int(tokens))
