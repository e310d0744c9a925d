"""Megatron's arguments in a checkpoint: what they say of a model and of a run.

Checkpoints that tokamake wrote have the whole architecture in `args.tokamake`; of others it is put
together from the arguments of Megatron-LM and its kin.
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

_POSITIONS = {"learned": "absolute", "rotary": "rotary", "alibi": "alibi"}
"""position_embedding and Megatron's position_embedding_type."""
_TITLES = {
    "megatron": "Megatron-LM",
    **dict.fromkeys(("mds", "mds-pipeline", "universal"), "Megatron-DeepSpeed"),
}
"""Whose arguments formats have."""


def arguments(
    checkpoint: Checkpoint, layout: ParallelLayout, *, padded_vocab_size: int
) -> argparse.Namespace:
    """Arguments that describe a model and how its checkpoint's files are to part it."""
    architecture, progress = checkpoint.architecture, checkpoint.progress
    found = _described(architecture)
    found.eos_token_id = checkpoint.notes.get("eos_token_id")
    stages = layout.pipeline_parallel_size
    found.padded_vocab_size = padded_vocab_size
    found.tensor_model_parallel_size = layout.tensor_parallel_size
    found.pipeline_model_parallel_size = stages
    found.no_pipeline_parallel = stages == 1
    found.consumed_train_samples = progress.consumed_samples
    found.consumed_train_tokens = progress.consumed_tokens
    if layout.virtual_pipeline_size > 1:
        per_stage = architecture.num_hidden_layers // (stages * layout.virtual_pipeline_size)
        found.virtual_pipeline_model_parallel_size = layout.virtual_pipeline_size
        found.num_layers_per_virtual_pipeline_stage = per_stage
    return found


def _described(shape: Architecture) -> argparse.Namespace:
    """Megatron's arguments that describe a model; `tokamake` holds the whole architecture."""
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
        position_embedding_type=_POSITIONS[shape.position_embedding],
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
    """Add what Megatron-LM calls by other names than Megatron-DeepSpeed."""
    args.group_query_attention = args.num_key_value_heads != args.num_attention_heads
    args.num_query_groups = args.num_key_value_heads
    args.normalization = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}[args.normalization]
    args.norm_epsilon = args.layernorm_epsilon
    whole = float(args.rope_theta).is_integer()
    args.rotary_base = int(args.rope_theta) if whole else args.rope_theta
    kinds = {"absolute": "learned_absolute", "rotary": "rope"}
    args.position_embedding_type = kinds.get(
        args.position_embedding_type, args.position_embedding_type
    )
    return args


def warnings(architecture: Architecture, format: str) -> list[str]:
    """What to tell of a checkpoint that Megatron would take for another model.

    Args:
        architecture: of the model.
        format: that it is written in.
    """
    title = _TITLES.get(format)
    is_megatron_lm = title == "Megatron-LM"
    settings = inexpressible(architecture, is_megatron_lm=is_megatron_lm) if title else []
    if not settings:
        return []
    return [
        f"{title} has no argument for {', '.join(settings)}: it would compute another model; "
        "tokamake reads it back as it is"
    ]


def architecture_of(
    args: Any, file: Path, *, padded_vocab_size: int, is_core: bool = False
) -> Architecture:
    """Shape and function of the model.

    Args:
        args: of the checkpoint.
        file: that they are in, for messages.
        padded_vocab_size: rows of the stored embedding, for a true size may not be known.
        is_core: whether the model is megatron.core's.

    Raises:
        UserError: an argument is missing, or the model is none that we have.
    """
    own = getattr(args, "tokamake", None)
    if own is not None:
        return validate(Architecture, own, f"{file}: args.tokamake")
    values = _shape(args, file, is_core=is_core)
    values["vocab_size"] = _vocab_size(args, file, padded_vocab_size) or padded_vocab_size
    return validate(Architecture, values, f"{file}: args")


def is_padding_unknown(args: Any, file: Path, *, padded_vocab_size: int) -> bool:
    """Whether nothing tells how many rows of an embedding are tokens; see `architecture_of`."""
    own = getattr(args, "tokamake", None) is not None
    return not own and _vocab_size(args, file, padded_vocab_size) is None


def _vocab_size(args: Any, file: Path, padded_vocab_size: int) -> int | None:
    """Number of tokens, where it is known."""
    size = number(getattr(args, "vocab_size", None) or 0, f"{file}: args.vocab_size")
    if size and getattr(args, "tokenizer_type", None) == "NullTokenizer":
        size += 1  # Megatron counts the token that ends documents apart there.
    return size if 0 < size <= padded_vocab_size else None


def number(value: Any, where: str) -> int:
    """A whole number.

    Raises:
        UserError: it is none.
    """
    if isinstance(value, int | float) and value == value // 1:
        return int(value)
    raise UserError(f"{where}: {value!r}: is no whole number; fetch or write the checkpoint again")


def _shape(args: Any, file: Path, *, is_core: bool) -> dict[str, Any]:
    heads = _needed(args, "num_attention_heads", file)
    family = family_of(args, file)
    return {
        "family": family,
        "hidden_size": _needed(args, "hidden_size", file),
        "intermediate_size": _needed(args, "ffn_hidden_size", file),
        "num_hidden_layers": _needed(args, "num_layers", file),
        "num_attention_heads": heads,
        "num_key_value_heads": _groups(args, file) or heads,
        "head_dim": first(args, "kv_channels"),
        "max_position_embeddings": _needed(args, "max_position_embeddings", file),
        "tie_word_embeddings": not getattr(args, "untie_embeddings_and_output_weights", False),
        "initializer_range": first(args, "init_method_std") or 0.02,
        **function_of(args, file, family=family, is_core=is_core),
    }


def _needed(args: Any, name: str, file: Path) -> Any:
    value = getattr(args, name, None)
    if value is None:
        raise UserError(f"{file}: args.{name}: missing; give a checkpoint that Megatron wrote")
    return value


def _groups(args: Any, file: Path) -> int | None:
    """Heads of keys and values, as Megatron-DeepSpeed, BigCode's Megatron or Megatron-LM say it."""
    if getattr(args, "attention_head_type", None) == "multiquery":
        return 1
    names = ["num_key_value_heads"]
    if getattr(args, "group_query_attention", False):
        names.append("num_query_groups")
    named = first(args, *names)
    return None if named is None else number(named, f"{file}: args.{names[-1]}")


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
            ranks = f"{name}-parallel rank{'s' * (found != 1)}"
            raise UserError(
                f"{folder}: has files of {found} {ranks}, its arguments say {said}; "
                "fetch or write all files of the checkpoint again"
            )


def progress_of(state: Any, file: Path) -> Progress:
    """How far the run of a checkpoint's state has come.

    Args:
        state: what a rank's file holds.
        file: it, for messages.

    Raises:
        UserError: a counter is no number.
    """
    args = state.get("args")
    samples = getattr(args, "consumed_train_samples", None) or state.get("global_samples") or 0
    tokens = getattr(args, "consumed_train_tokens", None) or state.get("tokens") or 0
    counts = {
        "iteration": state.get("iteration") or 0,
        "consumed_train_samples": samples,
        "consumed_train_tokens": tokens,
    }
    return Progress(*(number(count, f"{file}: {name}") for name, count in counts.items()))


def version_of(state: Any, file: Path, *, missing: float) -> float:
    """Megatron's checkpoint version.

    Args:
        state: what a rank's file holds.
        file: it, for messages.
        missing: what it is where there is none.

    Raises:
        UserError: it is no number.
    """
    version = state.get("checkpoint_version")
    if version is None:
        return missing
    if not isinstance(version, int | float):
        raise UserError(
            f"{file}: checkpoint_version: {version!r}: is no number; fetch or write the checkpoint "
            "again"
        )
    return float(version)
