"""The vocabulary size, if a checkpoint does not record which rows of its embedding are padding."""

from dataclasses import replace

from tokamake import plugins
from tokamake.checkpoint.tensors.checkpoint import Checkpoint
from tokamake.config.architecture import Architecture
from tokamake.errors import UserError

_ROW_PER_TOKEN = ("model.embed_tokens.weight", "lm_head.weight")


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
