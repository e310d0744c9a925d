"""The vocabulary's true size, where a checkpoint does not tell which rows of it are padding."""

from dataclasses import replace

from tokamake.checkpoint.tensors.checkpoint import Checkpoint
from tokamake.errors import UserError

_OF_WORDS = ("model.embed_tokens.weight", "lm_head.weight")
"""Tensors with a row for each token."""


def with_vocab_size(checkpoint: Checkpoint, size: int) -> Checkpoint:
    """The same checkpoint with so many tokens; further rows of its tensors are padding.

    Args:
        checkpoint: any.
        size: number of tokens.

    Raises:
        UserError: it has fewer rows, or tells another size itself.
    """
    option, known = f"--vocab-size {size}", checkpoint.architecture.vocab_size
    assert known is not None, "a checkpoint has its vocabulary's size"
    if size == known:
        return replace(checkpoint, is_padding_unknown=False)
    if not checkpoint.is_padding_unknown:
        raise UserError(
            f"{option}: the checkpoint in {checkpoint.path} says that it has {known:,} tokens; "
            "leave the option out"
        )
    if not 0 < size < known:
        raise UserError(
            f"{option}: the embedding in {checkpoint.path} has {known:,} rows; give 1 to {known}"
        )
    keys = [key for key in checkpoint.source if key.endswith(_OF_WORDS)]
    rows = [key for key in keys if checkpoint.source.shapes[key]]
    return replace(
        checkpoint,
        architecture=checkpoint.architecture.model_copy(update={"vocab_size": size}),
        source=checkpoint.source.first_rows(rows, size),
        is_padding_unknown=False,
    )


def unknown_size(checkpoint: Checkpoint) -> str | None:
    """What to tell of a vocabulary whose true size nothing tells."""
    if not checkpoint.is_padding_unknown:
        return None
    rows = checkpoint.architecture.vocab_size
    return (
        f"{checkpoint.path}: tells no vocabulary size, so all {rows:,} rows of the embedding are "
        "kept as tokens; if some are padding, give --vocab-size"
    )
