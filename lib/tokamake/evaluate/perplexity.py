"""Loss of a model on a long stream of tokens, window by window; perplexity and bits per byte."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tokamake.errors import UserError
from tokamake.inference.model import InferenceModel
from tokamake.runtime.console import progress
from tokamake.train.objectives.causal.objective import inputs_and_labels

_MAX_NATS = 700.0
"""Maximum loss per token: exp() of a little more overflows 64-bit floats."""


def windows(num_tokens: int, sequence_length: int) -> list[tuple[int, int]]:
    """Return the bounds [start, end) of windows over a stream. Neighbours share one token.

    A window predicts all its tokens except the first, so the windows predict each token of the
    stream except the first exactly once. Each window predicts `sequence_length` tokens; the last
    one may predict fewer.
    """
    starts = range(0, num_tokens - 1, sequence_length)
    return [(start, min(start + sequence_length + 1, num_tokens)) for start in starts]


def total_loss(
    model: InferenceModel, tokens: npt.NDArray[np.int64], *, sequence_length: int, batch_size: int
) -> float:
    """Return the sum of cross-entropies in nats of all tokens (tokens,) except the first.

    All ranks call this together and get the same result. Data-parallel ranks take turns with the
    batches; losses are added in the order of the batches, so their number changes nothing.
    """
    batches = [*_batches(len(tokens), sequence_length, batch_size=batch_size)]
    axis = model.mesh.data
    losses = torch.zeros(len(batches), dtype=torch.float64, device=model.device)
    # With FSDP, ranks that have no batch left must still take part in the last round.
    rounds = range(axis.rank, -(-len(batches) // axis.size) * axis.size, axis.size)
    for number in progress(rounds, label="evaluate", total=len(rounds), unit="batches"):
        batch = batches[min(number, len(batches) - 1)]
        rows = np.stack([tokens[start:end] for start, end in batch])
        inputs, labels = (
            torch.from_numpy(array).to(model.device) for array in inputs_and_labels(rows)
        )
        loss = model.total_loss(inputs, labels)
        if loss is not None and number < len(batches):
            losses[number] = loss
    return sum(model.add_up(losses).tolist())


def _batches(
    num_tokens: int, sequence_length: int, *, batch_size: int
) -> Iterator[list[tuple[int, int]]]:
    """Batch windows of equal length, then the short window alone, so nothing needs padding."""
    bounds = windows(num_tokens, sequence_length)
    full = [(start, end) for start, end in bounds if end - start == sequence_length + 1]
    for first in range(0, len(full), batch_size):
        yield full[first : first + batch_size]
    for short in bounds[len(full) :]:
        yield [short]


def measures(name: str, *, documents: int, tokens: int, bytes: int, nats: float) -> dict[str, Any]:
    """Perplexity and bits per byte of predicted tokens, bytes of their text, and nats of loss.

    UserError: the loss is too large for a finite perplexity, or NaN.
    """
    if not nats < _MAX_NATS * max(tokens, 1):
        raise UserError(
            f"{name}: loss {nats / tokens}: no finite perplexity; the weights are broken"
        )
    return {
        "documents": documents,
        "tokens": tokens,
        "bytes": bytes,
        "loss": nats / tokens if tokens else None,
        "perplexity": math.exp(nats / tokens) if tokens else None,
        "bits_per_byte": nats / math.log(2) / bytes if tokens and bytes else None,
    }
