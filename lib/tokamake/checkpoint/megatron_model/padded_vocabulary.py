"""Padding of the vocabulary: Megatron's embeddings have rows beyond the tokens."""

import math

from tokamake.checkpoint.tensors.extents import Chunk, row_slices


def padded_size(vocab_size: int, multiple: int) -> int:
    """Rows of an embedding: the next multiple of `multiple`."""
    return -(-vocab_size // multiple) * multiple


def padded_rows(name: str, shape: tuple[int, ...], *, rows: range) -> tuple[Chunk, ...]:
    """Some rows of a padded tensor; `shape` is the shape of ours, without padding.

    Rows of padding are the mean row.
    """
    num_tokens, *sizes = shape
    columns, width = (*sizes,), math.prod(sizes)
    tokens = range(min(rows.start, num_tokens), min(rows.stop, num_tokens))
    padding = range(len(tokens), len(rows))
    chunks = [Chunk(name, row_slices(tokens, columns))] if tokens else []
    if padding:
        # The mean row gives a padding token an average logit. Zeros could be the largest one.
        slices = row_slices(padding, columns)
        chunks.append(Chunk(name, slices, len(tokens) * width, is_mean=True))
    return (*chunks,)
