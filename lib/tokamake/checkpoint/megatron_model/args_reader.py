"""The description of a checkpoint in the file of its first rank: Megatron's `args` and counters.

A checkpoint that tokamake wrote holds the whole architecture in `args.tokamake`. Otherwise the
architecture is derived from the arguments of Megatron-LM and its forks, or from the shapes of
tensors: Megatron's first versions stored no arguments, as in NVIDIA's BERT and GPT-2 of 345 million
parameters.
"""

import logging
import re
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tokamake import plugins
from tokamake.checkpoint.megatron_model.model_arguments import architecture_fields, family_of
from tokamake.checkpoint.megatron_model.rank_file import progress_of, whole_number
from tokamake.checkpoint.tensors.checkpoint import EXPORT_NOTES, Checkpoint, ParallelLayout
from tokamake.checkpoint.tensors.source import TensorSource
from tokamake.config.architecture import Architecture
from tokamake.config_files import validate
from tokamake.errors import UserError
from tokamake.models.common.megatron_format import first
from tokamake.runtime.console import counted

_ROW_PER_TOKEN = ("model.embed_tokens.weight", "lm_head.weight")
_log = logging.getLogger(__name__)
_HEAD_DIM = 64
"""Width of the attention heads of all models that were published without arguments."""
_EMBEDDING = "language_model.embedding"
_LAYER = re.compile(r"language_model\.encoder\.layers\.(\d+)\.")
_NEEDED = (
    f"{_EMBEDDING}.word_embeddings.weight",
    f"{_EMBEDDING}.position_embeddings.weight",
    "language_model.encoder.layers.0.mlp.dense_h_to_4h.weight",
)


@dataclass(frozen=True)
class Description:
    """Description of the model and of the run."""

    file: Path
    """File of the first rank, for messages."""
    state: Mapping[str, Any]
    """Contents of the file."""
    args: Any
    """Megatron's arguments."""
    padded_vocab_size: int
    """Rows of the stored embedding on all ranks."""
    is_core: bool = False
    """Whether the model is megatron.core's."""
    names: frozenset[str] = frozenset()
    """Names of the tensors of the last stage, as current versions of Megatron have them."""

    @cached_property
    def architecture(self) -> Architecture:
        return architecture_of(
            self.args,
            self.file,
            padded_vocab_size=self.padded_vocab_size,
            is_core=self.is_core,
            names=self.names,
        )

    def checkpoint(
        self,
        format: str,
        folder: Path,
        source: TensorSource,
        *,
        layout: ParallelLayout = ParallelLayout(),  # noqa: B008
        unread: tuple[str, ...] = (),
        notes: Mapping[str, Any],
    ) -> Checkpoint:
        """Return the open checkpoint; see `Checkpoint` for the arguments."""
        is_described = getattr(self.args, "tokamake", None) is not None
        # Only tokamake writes them.
        kept = {key: getattr(self.args, key, None) for key in EXPORT_NOTES}
        kept["dropout"] = kept["dropout"] or _dropout(self.args, self.file)
        return Checkpoint(
            format,
            folder,
            self.architecture,
            source,
            layout,
            progress_of(self.state, self.file),
            self.padded_vocab_size,
            unread,
            {**{key: value for key, value in kept.items() if value is not None}, **notes},
            is_padding_unknown=not is_described
            and _vocab_size(self.args, self.file, self.padded_vocab_size) is None,
        )


def architecture_of(
    args: Any,
    file: Path,
    *,
    padded_vocab_size: int,
    is_core: bool = False,
    names: frozenset[str] = frozenset(),
) -> Architecture:
    """Return the architecture that arguments describe; `names` are tensors of the last stage."""
    description = getattr(args, "tokamake", None)
    if description is not None:
        return validate(Architecture, description, f"{file}: args.tokamake")
    values = _settings(args, file, is_core=is_core, names=names)
    values["vocab_size"] = _vocab_size(args, file, padded_vocab_size) or padded_vocab_size
    return validate(Architecture, values, f"{file}: args")


def _vocab_size(args: Any, file: Path, padded_vocab_size: int) -> int | None:
    size = whole_number(getattr(args, "vocab_size", None) or 0, f"{file}: args.vocab_size")
    if size and getattr(args, "tokenizer_type", None) == "NullTokenizer":
        size += 1  # Megatron does not count the end-of-document token of this tokenizer.
    return size if 0 < size <= padded_vocab_size else None


def _settings(args: Any, file: Path, *, is_core: bool, names: frozenset[str]) -> dict[str, Any]:
    family = family_of(args, file, names=names)
    heads = _required(args, "num_attention_heads", file=file)
    hidden_size = _required(args, "hidden_size", file=file)
    # At first, Megatron's MLPs always had four times this width.
    lacks_width = not hasattr(args, "ffn_hidden_size") and isinstance(hidden_size, int)
    return {
        "family": family,
        "hidden_size": hidden_size,
        "intermediate_size": 4 * hidden_size
        if lacks_width
        else _required(args, "ffn_hidden_size", file=file),
        "num_hidden_layers": _required(args, "num_layers", file=file),
        "num_attention_heads": heads,
        "num_key_value_heads": _key_value_heads(args, file) or heads,
        "head_dim": first(args, "kv_channels"),
        "max_position_embeddings": _required(args, "max_position_embeddings", file=file),
        "tie_word_embeddings": not getattr(args, "untie_embeddings_and_output_weights", False),
        "initializer_range": first(args, "init_method_std") or 0.02,
        **architecture_fields(args, file, family=family, is_core=is_core, names=names),
    }


def _required(args: Any, name: str, *, file: Path) -> Any:
    value = getattr(args, name, None)
    if value is None:
        raise UserError(f"{file}: args.{name}: missing; give a checkpoint that Megatron wrote")
    return value


def _dropout(args: Any, file: Path) -> dict[str, float] | None:
    """Dropout rates of training or None; Megatron has one for hidden states and embedding."""
    rates = []
    for name in ("hidden_dropout", "attention_dropout"):
        rate = getattr(args, name, None) or 0.0
        if not isinstance(rate, int | float):
            raise UserError(f"{file}: args.{name}: {rate!r}: not a rate; correct it")
        rates.append(float(rate))
    hidden, attention = rates
    return {"hidden": hidden, "attention": attention, "embedding": hidden} if any(rates) else None


def _key_value_heads(args: Any, file: Path) -> int | None:
    if getattr(args, "attention_head_type", None) == "multiquery":  # BigCode's Megatron
        return 1
    names = ["num_key_value_heads"]  # Megatron-DeepSpeed
    # Megatron-LM ignores num_query_groups without group_query_attention.
    if getattr(args, "group_query_attention", False):
        names.append("num_query_groups")
    count = first(args, *names)
    return None if count is None else whole_number(count, f"{file}: args.{names[-1]}")


def check_rank_counts(args: Any, folder: Path, *, tensor: int, pipeline: int) -> None:
    """Check that the arguments agree with the number of ranks that have files."""
    for name, count in (("tensor", tensor), ("pipeline", pipeline)):
        ranks = counted(count, f"{name}-parallel rank")
        expected = getattr(args, f"{name}_model_parallel_size", None)
        if expected not in (None, count):
            raise UserError(
                f"{folder}: has files of {ranks}, its arguments say {expected}; "
                "fetch or write all files of the checkpoint again"
            )


def with_vocab_size(checkpoint: Checkpoint, size: int) -> Checkpoint:
    """Return the checkpoint with `size` tokens; later rows of the embedding are padding."""
    option, num_rows = f"--vocab-size {size}", checkpoint.architecture.vocab_size
    assert num_rows is not None, "an open checkpoint has a vocabulary size"
    if size == num_rows:
        return replace(checkpoint, is_padding_unknown=False)
    if not checkpoint.is_padding_unknown:
        raise UserError(
            f"{option}: the checkpoint in {checkpoint.path} says that it has {num_rows:,} tokens; "
            "leave the option out"
        )
    if not 0 < size < num_rows:
        raise UserError(
            f"{option}: the embedding in {checkpoint.path} has {num_rows:,} rows; give 1 to "
            f"{num_rows}"
        )
    # The keys of optimizer states have the same ends. Step counts have no rows.
    keys = [key for key in checkpoint.source if key.endswith(_names(checkpoint.architecture))]
    keys_with_rows = [key for key in keys if checkpoint.source.shapes[key]]
    return replace(
        checkpoint,
        architecture=checkpoint.architecture.model_copy(update={"vocab_size": size}),
        source=checkpoint.source.first_rows(keys_with_rows, size),
        is_padding_unknown=False,
    )


def _names(architecture: Architecture) -> tuple[str, ...]:
    """Ends of the names of tensors with a row per token."""
    heads = getattr(plugins.load("models/*/megatron", architecture.family), "HEADS", ())
    of_heads = [module.ours[0] for module in heads if module.split == "vocabulary"]
    return (*_ROW_PER_TOKEN, *(f"model.{name}.bias" for name in of_heads))


def unknown_size_warning(checkpoint: Checkpoint) -> str | None:
    """Return a warning if the checkpoint does not record its vocabulary size."""
    if not checkpoint.is_padding_unknown:
        return None
    num_rows = checkpoint.architecture.vocab_size
    return (
        f"{checkpoint.path}: does not record the vocabulary size, so all {num_rows:,} rows of the "
        "embedding are kept as tokens; if some are padding, give --vocab-size"
    )


def arguments_from_shapes(
    shapes: Mapping[str, tuple[int, ...]], file: Path, *, tensor_parallel_size: int
) -> Namespace:
    """Derive the arguments of a model from shapes on the first rank; warn of unknown ones."""
    missing = [name for name in _NEEDED if name not in shapes]
    words, positions, mlp = (shapes.get(name, (0, 0)) for name in _NEEDED)
    hidden_size = words[1]
    if missing or hidden_size % _HEAD_DIM:
        size = f"a hidden size of {hidden_size}, no multiple of {_HEAD_DIM}"
        reason = f"no {missing[0]}" if missing else size
        raise UserError(
            f"{file}: has no args, and {reason}: it is none of the models that Megatron wrote "
            "without args; give a checkpoint with them"
        )
    num_heads = hidden_size // _HEAD_DIM
    _log.warning(
        "%s: has no args: assuming %d attention heads of width %d, and a GELU by tanh in MLPs",
        *(file, num_heads, _HEAD_DIM),
    )
    return Namespace(
        num_layers=len({match[1] for name in shapes if (match := _LAYER.match(name))}),
        hidden_size=hidden_size,
        ffn_hidden_size=mlp[0] * tensor_parallel_size,
        num_attention_heads=num_heads,
        max_position_embeddings=positions[0],
        bert_binary_head="binary_head.weight" in shapes,
    )
