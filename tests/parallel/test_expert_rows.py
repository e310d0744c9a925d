"""Rows of tokens sorted by expert, against a loop over choices."""

import pytest
import torch
from torch import Tensor

from tokamake.parallel.expert_rows import ExpertRows

NUM_EXPERTS = 5


def choices(number: int, *, drops: bool) -> tuple[Tensor, Tensor | None]:
    """Experts of 9 tokens, and which choices are kept."""
    generator = torch.Generator().manual_seed(number)
    chosen = torch.rand(9, NUM_EXPERTS, generator=generator).argsort(1)[:, :number]
    kept = torch.rand(9, number, generator=generator) < 0.6 if drops else None
    return chosen, kept


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("drops", [False, True])
def test_rows_are_sorted_by_expert_and_add_up(number: int, drops: bool) -> None:
    chosen, kept = choices(number, drops=drops)
    num_rows = None if kept is None else int(kept.sum())
    rows = ExpertRows(chosen, kept, num_rows=num_rows)
    x = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(9, number, dtype=torch.float64, requires_grad=True)
    by_expert = [
        (token, place)
        for expert in range(NUM_EXPERTS)
        for token, place in (chosen == expert).nonzero().tolist()
        if kept is None or kept[token, place]
    ]
    assert torch.equal(rows.of_tokens(x), torch.stack([x[token] for token, _ in by_expert]))
    of_choices = torch.stack([weights[place] for place in by_expert])
    assert torch.equal(rows.of_choices(weights), of_choices)
    summed = rows.summed(rows.of_tokens(x) ** 2 * rows.of_choices(weights)[:, None])
    used = torch.ones(9, number, dtype=torch.float64) if kept is None else kept.double()
    expected = x**2 * (weights * used).sum(1, keepdim=True)
    torch.testing.assert_close(summed, expected)
    factors = torch.randn(9, 4, dtype=torch.float64)
    own, right = (
        torch.autograd.grad((y * factors).sum(), (x, weights), retain_graph=True)
        for y in (summed, expected)
    )
    for gradient, expected_gradient in zip(own, right, strict=True):
        torch.testing.assert_close(gradient, expected_gradient)


def test_all_choices_may_be_dropped() -> None:
    chosen, _ = choices(2, drops=False)
    rows = ExpertRows(chosen, torch.zeros(9, 2, dtype=torch.bool), num_rows=0)
    x = torch.randn(9, 4, requires_grad=True)
    summed = rows.summed(rows.of_tokens(x))
    summed.sum().backward()
    assert not summed.any()
    assert x.grad is not None
    assert not x.grad.any()
