"""The loss of labels equals torch's, and rows without a label have none."""

import torch
from torch.nn import functional as F

from tokamake.train.objectives.classification.objective import num_labeled, sum_of_losses
from tokamake.train.objectives.classification.rows import NO_CLASS

GENERATOR = torch.Generator().manual_seed(2)


def test_rows_without_a_class_have_no_loss() -> None:
    logits = torch.randn(4, 3, generator=GENERATOR)
    labels = torch.tensor([2, NO_CLASS, 0, NO_CLASS])
    expected = F.cross_entropy(logits[[0, 2]], labels[[0, 2]], reduction="sum")
    torch.testing.assert_close(sum_of_losses(logits, labels), expected)
    assert num_labeled(labels) == 2
    assert sum_of_losses(logits[:1], labels[1:2]) == 0


def test_options_of_a_row_compete() -> None:
    logits = torch.randn(8, 1, generator=GENERATOR)
    labels = torch.tensor([3, 1])
    expected = F.cross_entropy(logits.view(2, 4), labels, reduction="sum")
    torch.testing.assert_close(sum_of_losses(logits, labels), expected)


def test_numbers_have_a_squared_error() -> None:
    logits = torch.randn(3, 1, generator=GENERATOR).requires_grad_()
    labels = torch.tensor([1.5, torch.nan, -2.0])
    loss = sum_of_losses(logits, labels)
    kept = [0, 2]
    expected = F.mse_loss(logits[kept, 0], labels[kept], reduction="sum")
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert logits.grad is not None
    assert logits.grad[1] == 0
    assert num_labeled(labels) == 2
