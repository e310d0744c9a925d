"""Loss of a model on one long stream of tokens, window by window.

Streams come from `held_out`; sums of negative log-likelihoods go to `evaluate`.
"""

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import torch

from tokamake.runtime.console import progress
from tokamake.train.batch import inputs_and_labels

Forward = Callable[[torch.Tensor], torch.Tensor]
"""Tokens (B, L) int64 to logits (B, L, V)."""


def windows(num_tokens: int, sequence_length: int) -> list[tuple[int, int]]:
    """Bounds [start, end) of windows over a stream; neighbours share one token.

    A window of `end - start` tokens predicts all but its first, so that every token of the stream
    after the first is predicted exactly once. All windows predict `sequence_length` tokens, the
    last one perhaps fewer.
    """
    starts = range(0, num_tokens - 1, sequence_length)
    return [(start, min(start + sequence_length + 1, num_tokens)) for start in starts]


def total_loss(
    forward: Forward,
    tokens: npt.NDArray[np.int64],
    *,
    sequence_length: int,
    batch_size: int,
    device: torch.device,
) -> float:
    """Sum of the cross-entropies, in nats, of all tokens but the first given those before.

    Args:
        forward: the model.
        tokens: (tokens,) the stream.
        sequence_length: longest input of the model.
        batch_size: windows scored at once; memory grows with it, the result does not change.
        device: where the model lies.
    """
    total = torch.zeros((), dtype=torch.float64)
    with torch.inference_mode():
        batches = _batches(tokens, sequence_length, batch_size)
        for batch in progress(batches, label="evaluate", unit="batches"):
            inputs, labels = (
                torch.from_numpy(array).to(device) for array in inputs_and_labels(batch)
            )
            logits = forward(inputs).float()
            losses = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), labels.flatten(), reduction="none"
            )
            total += losses.double().sum().cpu()
    return total.item()


def _batches(
    tokens: npt.NDArray[np.int64], sequence_length: int, batch_size: int
) -> Iterator[npt.NDArray[np.int64]]:
    """Windows of equal length in batches, then the short one alone: nothing is padded."""
    bounds = windows(len(tokens), sequence_length)
    whole = [(start, end) for start, end in bounds if end - start == sequence_length + 1]
    for first in range(0, len(whole), batch_size):
        rows = whole[first : first + batch_size]
        yield np.stack([tokens[start:end] for start, end in rows])
    for start, end in bounds[len(whole) :]:
        yield tokens[None, start:end]
