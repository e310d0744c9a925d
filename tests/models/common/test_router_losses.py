"""Losses of routers against transformers' balance loss, row by row, and the formula of z."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from tests.support.dense import ARCHITECTURES
from tests.support.random_tensors import random_tensors
from tokamake.checkpoint.model_tensors import to_model
from tokamake.models.common.experts import MixtureOfExperts
from tokamake.models.common.recompute import Recompute
from tokamake.models.common.router_losses import RouterLosses

SHAPE = ARCHITECTURES["qwen3_moe"]
NUM_EXPERTS, NUM_CHOSEN, NUM_LAYERS = 7, 3, 3
LENGTHS = (12, 5, 0)
"""Tokens of each row; the rest of it is filled up."""
CPU = torch.device("cpu")


def watched(balance: float, z: float) -> tuple[Any, RouterLosses]:
    weights = {name: 10 * each for name, each in random_tensors(SHAPE, 1).items()}
    model = to_model(SHAPE, weights)
    losses = RouterLosses(
        balance=balance, z=z, layers=range(NUM_LAYERS), num_experts=NUM_EXPERTS, device=CPU
    )
    model.watch_routers(losses)  # type: ignore[operator]  # of models with experts
    return model, losses


def expected_losses(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Balance and z of a layer, summed over rows, by the scores (B, L, E)."""
    rows = [row[:length] for row, length in zip(scores, LENGTHS, strict=True) if length]
    balance = sum(load_balancing_loss_func((row,), NUM_EXPERTS, NUM_CHOSEN) for row in rows)
    z = sum((row.exp().sum(-1).log() ** 2).mean() for row in rows)
    return balance / NUM_CHOSEN, z  # type: ignore[operator, return-value]


@pytest.mark.parametrize(("balance", "z"), [(0.3, 0.0), (0.0, 0.2), (0.3, 0.2)])
def test_gradients_are_those_of_the_mean_over_rows(balance: float, z: float) -> None:
    model, losses = watched(balance, z)
    mlp: MixtureOfExperts = model.layers["1"].mlp
    states = torch.randn(3, 12, SHAPE.hidden_size, requires_grad=True)
    is_token = torch.arange(12) < torch.tensor(LENGTHS)[:, None]
    losses.factor = 1 / len(LENGTHS)
    # The results have a gradient of 0, so all gradients are of the losses.
    (mlp(states, is_token) * 0).sum().backward()
    found = states.grad, mlp.gate.weight.grad
    scores = states @ mlp.gate.weight.T
    of_balance, of_z = expected_losses(scores)
    total = (balance * of_balance + z * of_z) / len(LENGTHS)
    for own, right in zip(
        found, torch.autograd.grad(total, (states, mlp.gate.weight)), strict=True
    ):
        assert own is not None
        torch.testing.assert_close(own, right, atol=1e-6, rtol=1e-4)
    before, measured, _ = losses.read(losses.take().tolist(), len(LENGTHS))
    assert not any(before.counts)
    assert sum(measured.counts) == sum(LENGTHS) * NUM_CHOSEN
    assert measured.balance == pytest.approx(of_balance.item() / 3, rel=1e-5)
    assert measured.z == pytest.approx(of_z.item() / 3, rel=1e-5)
    probabilities = [row[:n].softmax(-1) for row, n in zip(scores, LENGTHS, strict=True) if n]
    entropies = [(-row * row.log()).sum(-1).mean().item() for row in probabilities]
    assert measured.entropy == pytest.approx(sum(entropies) / 3, rel=1e-5)
    assert not losses.take().any()


def test_even_choices_have_a_balance_of_one() -> None:
    model, losses = watched(1.0, 0.0)
    mlp = model.layers["0"].mlp
    with torch.no_grad():
        mlp.gate.weight.copy_(torch.eye(NUM_EXPERTS, SHAPE.hidden_size))
    states = torch.zeros(1, NUM_EXPERTS, SHAPE.hidden_size)
    for token in range(NUM_EXPERTS):  # each expert is chosen by three tokens, and as likely as all
        for rank in range(NUM_CHOSEN):
            states[0, token, (token + rank) % NUM_EXPERTS] = 3.0 - rank
    losses.factor = 1.0
    mlp(states.requires_grad_()).sum().backward()
    measured, *_ = losses.read(losses.take().tolist(), 1)
    assert measured.balance == pytest.approx(1.0)
    assert {*measured.counts} == {3.0}


@pytest.mark.parametrize("granularity", ["full", "selective"])
def test_layers_that_are_computed_again_count_once(granularity: Any) -> None:
    model, losses = watched(0.3, 0.2)
    tokens = torch.arange(36).view(3, 12)
    found = []
    for recompute in (Recompute(), Recompute(granularity)):
        model.set_recompute(recompute)
        model.zero_grad()
        losses.factor = 1 / 3
        model(tokens).square().mean().backward()
        gradients = [each.grad.clone() for each in model.parameters()]
        found.append([losses.take(), *gradients])
    assert all(map(torch.equal, *found))
    assert found[0][0].view(NUM_LAYERS, -1)[:, 3:].sum() == NUM_LAYERS * 36 * NUM_CHOSEN


def test_nothing_is_measured_without_a_factor_or_without_gradients() -> None:
    model, losses = watched(0.3, 0.2)
    tokens = torch.arange(24).view(2, 12)
    model(tokens).sum().backward()
    losses.factor = 0.5
    with torch.no_grad():
        model(tokens)
    assert not losses.take().any()


def test_only_the_last_micro_batches_are_kept() -> None:
    model, losses = watched(0.3, 0.2)
    losses.factor = 1.0
    for number in range(3):
        model(torch.arange(12).view(1, 12) + number).sum().backward()
    losses.keep(2)
    layers = losses.read(losses.take().tolist(), 2)
    assert [sum(each.counts) for each in layers] == [2 * 12 * NUM_CHOSEN] * NUM_LAYERS
