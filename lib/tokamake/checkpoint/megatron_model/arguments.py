"""Megatron's `args` in a checkpoint: the description of the model and of the run.

A checkpoint that tokamake wrote holds the whole architecture in `args.tokamake`. Otherwise the
architecture is derived from the arguments of Megatron-LM and its forks.
"""

import argparse
from pathlib import Path
from typing import Any

from tokamake import plugins
from tokamake.checkpoint.megatron_model.function import (
    KIND,
    arguments_of,
    family_of,
    function_of,
    inexpressible,
)
from tokamake.checkpoint.tensors.checkpoint import Checkpoint, ParallelLayout, Progress, Target
from tokamake.config.architecture import Architecture
from tokamake.errors import UserError
from tokamake.models.common.megatron_format import first
from tokamake.validation import validate

_POSITION_TYPES = {"learned": "absolute", "rotary": "rotary", "alibi": "alibi"}
"""position_embedding_type of Megatron for each position_embedding."""
_TITLES = {
    "megatron": "Megatron-LM",
    **dict.fromkeys(("mds", "mds-pipeline", "universal"), "Megatron-DeepSpeed"),
}
"""Program that reads the arguments of each format."""


def megatron_arguments(
    checkpoint: Checkpoint, layout: ParallelLayout, *, padded_vocab_size: int
) -> argparse.Namespace:
    """Return the arguments that describe a checkpoint's model, progress and parallel layout."""
    architecture, progress = checkpoint.architecture, checkpoint.progress
    args = _model_arguments(architecture)
    args.eos_token_id = checkpoint.notes.get("eos_token_id")
    stages = layout.pipeline_parallel_size
    args.padded_vocab_size = padded_vocab_size
    args.tensor_model_parallel_size = layout.tensor_parallel_size
    args.pipeline_model_parallel_size = stages
    args.no_pipeline_parallel = stages == 1
    args.consumed_train_samples = progress.consumed_samples
    args.consumed_train_tokens = progress.consumed_tokens
    if layout.virtual_pipeline_size > 1:
        num_layers = architecture.num_hidden_layers // (stages * layout.virtual_pipeline_size)
        args.virtual_pipeline_model_parallel_size = layout.virtual_pipeline_size
        args.num_layers_per_virtual_pipeline_stage = num_layers
    return args


def _model_arguments(shape: Architecture) -> argparse.Namespace:
    """Return the arguments that describe a model, and the whole architecture in `tokamake`."""
    arguments = dict(
        num_layers=shape.num_hidden_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.intermediate_size,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        kv_channels=shape.head_dim,
        max_position_embeddings=shape.max_position_embeddings,
        seq_length=shape.max_position_embeddings,
        vocab_size=shape.vocab_size,
        make_vocab_size_divisible_by=Target.make_vocab_size_divisible_by,
        untie_embeddings_and_output_weights=not shape.tie_word_embeddings,
        add_position_embedding=shape.position_embedding == "learned",
        use_rotary_position_embeddings=shape.position_embedding == "rotary",
        position_embedding_type=_POSITION_TYPES[shape.position_embedding],
        rope_theta=shape.rope_theta,
        embed_layernorm=False,
        normalization="layernorm",
        layernorm_epsilon=1e-5,
        swiglu=False,
        add_bias_linear=shape.attention_bias and shape.mlp_bias,
        init_method_std=shape.initializer_range,
        tokamake=shape.model_dump(),
        **arguments_of(shape),
    )
    # The family's values replace those above and keep their places.
    return argparse.Namespace(**arguments | plugins.load(KIND, shape.family).arguments(shape))


def as_megatron_lm(args: argparse.Namespace) -> argparse.Namespace:
    """Add the names and values of Megatron-LM that differ from Megatron-DeepSpeed's."""
    args.group_query_attention = args.num_key_value_heads != args.num_attention_heads
    args.num_query_groups = args.num_key_value_heads
    args.normalization = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}[args.normalization]
    args.norm_epsilon = args.layernorm_epsilon
    # Megatron-LM's --rotary-base is an int.
    is_whole = float(args.rope_theta).is_integer()
    args.rotary_base = int(args.rope_theta) if is_whole else args.rope_theta
    kinds = {"absolute": "learned_absolute", "rotary": "rope"}
    args.position_embedding_type = kinds.get(
        args.position_embedding_type, args.position_embedding_type
    )
    return args


def argument_warnings(architecture: Architecture, format: str) -> list[str]:
    """Return a warning if Megatron has no argument for a setting of the model."""
    title = _TITLES.get(format)
    is_megatron_lm = title == "Megatron-LM"
    settings = inexpressible(architecture, is_megatron_lm=is_megatron_lm) if title else []
    if not settings:
        return []
    return [
        f"{title} has no argument for {', '.join(settings)}: it would compute a different model; "
        "tokamake reads the checkpoint back without loss"
    ]


def architecture_of(
    args: Any, file: Path, *, padded_vocab_size: int, is_core: bool = False
) -> Architecture:
    """Return the architecture that a checkpoint's arguments describe.

    Args:
        args: Megatron's arguments.
        file: where they come from, for messages.
        padded_vocab_size: rows of the stored embedding; the vocabulary size if none is known.
        is_core: whether the model is megatron.core's.

    Raises:
        UserError: an argument is missing, or tokamake has no such model.
    """
    description = getattr(args, "tokamake", None)
    if description is not None:
        return validate(Architecture, description, f"{file}: args.tokamake")
    values = _settings(args, file, is_core=is_core)
    values["vocab_size"] = _vocab_size(args, file, padded_vocab_size) or padded_vocab_size
    return validate(Architecture, values, f"{file}: args")


def is_padding_unknown(args: Any, file: Path, *, padded_vocab_size: int) -> bool:
    """Return whether the arguments do not say how many rows of the embedding are tokens."""
    is_described = getattr(args, "tokamake", None) is not None
    return not is_described and _vocab_size(args, file, padded_vocab_size) is None


def _vocab_size(args: Any, file: Path, padded_vocab_size: int) -> int | None:
    size = whole_number(getattr(args, "vocab_size", None) or 0, f"{file}: args.vocab_size")
    if size and getattr(args, "tokenizer_type", None) == "NullTokenizer":
        size += 1  # Megatron does not count the end-of-document token of this tokenizer.
    return size if 0 < size <= padded_vocab_size else None


def whole_number(value: Any, name: str) -> int:
    """Convert an int, or a float without a fraction, to an int.

    Raises:
        UserError: the value is neither.
    """
    if isinstance(value, int | float) and value == value // 1:
        return int(value)
    raise UserError(
        f"{name}: {value!r}: is not a whole number; fetch or write the checkpoint again"
    )


def _settings(args: Any, file: Path, *, is_core: bool) -> dict[str, Any]:
    heads = _required(args, "num_attention_heads", file)
    family = family_of(args, file)
    return {
        "family": family,
        "hidden_size": _required(args, "hidden_size", file),
        "intermediate_size": _required(args, "ffn_hidden_size", file),
        "num_hidden_layers": _required(args, "num_layers", file),
        "num_attention_heads": heads,
        "num_key_value_heads": _key_value_heads(args, file) or heads,
        "head_dim": first(args, "kv_channels"),
        "max_position_embeddings": _required(args, "max_position_embeddings", file),
        "tie_word_embeddings": not getattr(args, "untie_embeddings_and_output_weights", False),
        "initializer_range": first(args, "init_method_std") or 0.02,
        **function_of(args, file, family=family, is_core=is_core),
    }


def _required(args: Any, name: str, file: Path) -> Any:
    value = getattr(args, name, None)
    if value is None:
        raise UserError(f"{file}: args.{name}: missing; give a checkpoint that Megatron wrote")
    return value


def _key_value_heads(args: Any, file: Path) -> int | None:
    if getattr(args, "attention_head_type", None) == "multiquery":  # BigCode's Megatron
        return 1
    names = ["num_key_value_heads"]  # Megatron-DeepSpeed
    # Megatron-LM ignores num_query_groups without group_query_attention.
    if getattr(args, "group_query_attention", False):
        names.append("num_query_groups")
    count = first(args, *names)
    return None if count is None else whole_number(count, f"{file}: args.{names[-1]}")


def eos_note(args: Any) -> dict[str, Any]:
    """Return the note with the end-of-document token, which only tokamake's checkpoints have."""
    token = getattr(args, "eos_token_id", None)
    return {} if token is None else {"eos_token_id": token}


def check_rank_counts(args: Any, folder: Path, *, tensor: int, pipeline: int) -> None:
    """Check that the arguments agree with the number of ranks that have files.

    Raises:
        UserError: they do not.
    """
    for name, count in (("tensor", tensor), ("pipeline", pipeline)):
        expected = getattr(args, f"{name}_model_parallel_size", None)
        if expected not in (None, count):
            ranks = f"{name}-parallel rank{'s' * (count != 1)}"
            raise UserError(
                f"{folder}: has files of {count} {ranks}, its arguments say {expected}; "
                "fetch or write all files of the checkpoint again"
            )


def progress_of(state: Any, file: Path) -> Progress:
    """Return the progress of the run that a checkpoint records.

    Args:
        state: contents of a rank's file.
        file: the file, for messages.

    Raises:
        UserError: a counter is not a whole number.
    """
    args = state.get("args")
    samples = getattr(args, "consumed_train_samples", None) or state.get("global_samples") or 0
    tokens = getattr(args, "consumed_train_tokens", None) or state.get("tokens") or 0
    counts = {
        "iteration": state.get("iteration") or 0,
        "consumed_train_samples": samples,
        "consumed_train_tokens": tokens,
    }
    return Progress(*(whole_number(count, f"{file}: {name}") for name, count in counts.items()))


def version_of(state: Any, file: Path, *, default: float) -> float:
    """Return Megatron's checkpoint_version, or the default if a file has none.

    Args:
        state: contents of a rank's file.
        file: the file, for messages.
        default: version of a file without the key.

    Raises:
        UserError: the version is not a number.
    """
    version = state.get("checkpoint_version")
    if version is None:
        return default
    if not isinstance(version, int | float):
        raise UserError(
            f"{file}: checkpoint_version: {version!r}: is not a number; fetch or write the "
            "checkpoint again"
        )
    return float(version)
