"""Labeled rows as the trainer takes them, and the loss of their labels.

Shape suffixes: B rows of a micro batch, O options of a row (1 unless the task is a choice), L
tokens.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from tokamake.train.objectives._packing import encoder_arrays

NO_CLASS = -100
"""Label of rows that only fill up a batch; in a regression, that is NaN."""


class TaskRows(NamedTuple):
    """A micro batch of labeled rows. The loss of a step is the mean over its rows with a label."""

    tokens: npt.NDArray[np.int64]
    """(B × O, L) tokens, padding last."""
    types: npt.NDArray[np.int64]
    """(B × O, L) type of each token: 0 in the first text, 1 in the second one."""
    padding_mask: npt.NDArray[np.bool_]
    """(B × O, L) True for tokens, False for padding."""
    labels: npt.NDArray[Any]
    """(B,) int64 class or option, `NO_CLASS` without; or float32 number, NaN without."""
    num_labels: int
    """Rows with a label in the whole step, on all ranks."""

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Keyword arguments of `Model.forward`."""
        return encoder_arrays(self.types, self.padding_mask)


def sum_of_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of the cross entropy, or squared error, of rows that have a label, fp32.

    Args:
        logits: (B, classes), (B × O, 1) of a choice, or (B, 1) of a regression.
        labels: (B,) int64 classes or options, or float32 numbers, see `TaskRows`.
    """
    logits = logits.float()
    if labels.is_floating_point():
        differences = torch.where(labels.isnan(), 0.0, logits[:, 0] - labels.nan_to_num())
        return differences.square().sum()
    by_row = logits.view(len(labels), -1)
    return F.cross_entropy(by_row, labels, ignore_index=NO_CLASS, reduction="sum")


def num_labeled(labels: Tensor) -> Tensor:
    """Number of rows that have a label, an fp32 scalar."""
    has_label = ~labels.isnan() if labels.is_floating_point() else labels != NO_CLASS
    return has_label.sum(dtype=torch.float32)
