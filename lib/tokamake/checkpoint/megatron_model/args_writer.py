"""Megatron's `args` in a checkpoint that tokamake writes; `args_reader` reads them."""

import argparse

from tokamake import plugins
from tokamake.checkpoint.megatron_model.model_arguments import KIND, arguments_of, inexpressible
from tokamake.checkpoint.tensors.checkpoint import EXPORT_NOTES, Checkpoint, ParallelLayout, Target
from tokamake.config.architecture import Architecture
from tokamake.models.common.megatron_windows import WINDOW_ARGUMENTS

_POSITION_TYPES = {"learned": "absolute", "rotary": "rotary", "alibi": "alibi"}
"""position_embedding_type of Megatron for each position_embedding."""


def megatron_arguments(
    checkpoint: Checkpoint, layout: ParallelLayout, *, padded_vocab_size: int
) -> argparse.Namespace:
    """Return the arguments that describe a checkpoint's model, progress and parallel layout."""
    architecture, progress = checkpoint.architecture, checkpoint.progress
    args = _model_arguments(architecture)
    for key in EXPORT_NOTES:
        setattr(args, key, checkpoint.notes.get(key))
    rates = checkpoint.notes.get("dropout", {})
    args.hidden_dropout = rates.get("hidden", 0.0)
    args.attention_dropout = rates.get("attention", 0.0)
    stages = layout.pipeline_parallel_size
    args.padded_vocab_size = padded_vocab_size
    args.tensor_model_parallel_size = layout.tensor_parallel_size
    args.pipeline_model_parallel_size = stages
    args.no_pipeline_parallel = stages == 1
    if architecture.has_routers:
        args.expert_model_parallel_size = layout.expert_parallel_size
    args.consumed_train_samples = progress.consumed_samples
    args.consumed_train_tokens = progress.consumed_tokens
    if layout.virtual_pipeline_size > 1:
        num_layers = architecture.num_hidden_layers // (stages * layout.virtual_pipeline_size)
        args.virtual_pipeline_model_parallel_size = layout.virtual_pipeline_size
        args.num_layers_per_virtual_pipeline_stage = num_layers
    return args


def _model_arguments(shape: Architecture) -> argparse.Namespace:
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
    # The family's values replace the values above and keep their places.
    plug_in = plugins.load(KIND, shape.family)
    own = {name: value for name, value in plug_in.ARGUMENTS.items() if name not in WINDOW_ARGUMENTS}
    return argparse.Namespace(**arguments | own | plug_in.arguments(shape))


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


def argument_warnings(checkpoint: Checkpoint, *, is_megatron_lm: bool) -> list[str]:
    """Return warnings about settings without an argument of Megatron-LM or Megatron-DeepSpeed."""
    title, warnings = "Megatron-LM" if is_megatron_lm else "Megatron-DeepSpeed", []
    if settings := inexpressible(checkpoint.architecture, is_megatron_lm=is_megatron_lm):
        warnings.append(
            f"{title} has no argument for {', '.join(settings)}: it would compute a different "
            "model; tokamake reads the checkpoint back without loss"
        )
    rates = checkpoint.notes.get("dropout", {})
    hidden = rates.get("hidden", 0.0)
    if (embedding := rates.get("embedding", hidden)) != hidden:
        warnings.append(
            f"{title} has no argument for dropout of the embedding, here {embedding:g}: a training "
            f"there uses its hidden_dropout, {hidden:g}"
        )
    return warnings
