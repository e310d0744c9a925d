"""Loss of a model on rows of tokens, as the trainer computes it."""

from typing import Any

import torch

from tokamake.models.common.language_model import predictions
from tokamake.parallel.loss import NO_LABEL, cross_entropy
from tokamake.train.objectives.causal.objective import inputs_and_labels


def mean_loss(
    model: Any,
    tokens: torch.Tensor,
    loss_mask: torch.Tensor | None = None,
    **further: torch.Tensor,
) -> torch.Tensor:
    """Mean cross entropy in nats, fp32, of tokens 1 … L given those before them.

    Args:
        tokens: (B, L + 1) int64 token ids; one below 0 is no token.
        loss_mask: (B, L) bool, which inputs have a loss.
        further: further inputs of the model.
    """
    mask = None if loss_mask is None else loss_mask.numpy()
    inputs, labels = map(torch.from_numpy, inputs_and_labels(tokens.numpy(), mask))
    size = model.architecture.vocab_size
    logits = predictions(model(inputs, **further)).logits
    total = cross_entropy(logits, labels, mesh=model.mesh, size=size)
    return total / (labels != NO_LABEL).sum().clamp(min=1)
