"""Capacity of experts: against a loop over tokens, and over context-parallel ranks."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from tests.support.dense import ARCHITECTURES
from tests.support.random_tensors import random_tensors
from tests.support.ranks import spawn
from tokamake.checkpoint.model_tensors import to_model
from tokamake.models.common.expert_capacity import ExpertCapacity
from tokamake.models.common.router_losses import RouterLosses
from tokamake.parallel.axis import Axis
from tokamake.parallel.context import share
from tokamake.parallel.mesh import Mesh

SHAPE = ARCHITECTURES["qwen3_moe"]
NUM_EXPERTS, NUM_CHOSEN = 7, 3
LENGTHS = (12, 5, 0)
"""Tokens of each row; the rest of it is filled up."""
IS_TOKEN = torch.arange(12) < torch.tensor(LENGTHS)[:, None]


def watched(factor: float | None) -> tuple[Any, RouterLosses]:
    """A layer that trains with a capacity, and its measurements."""
    weights = {name: 10 * each for name, each in random_tensors(SHAPE, 1).items()}
    model: Any = to_model(SHAPE, weights)
    losses = RouterLosses(
        balance=0.0, z=0.0, layers=range(3), num_experts=NUM_EXPERTS, device=torch.device("cpu")
    )
    losses.factor = 1 / 3
    model.watch_routers(losses, capacity_factor=factor)
    return model.layers["0"].mlp, losses


def taken_choices(chosen: Tensor, factor: float) -> set[tuple[int, int, int]]:
    """(row, token, expert) that experts take, by a loop over the choices (B, L, K)."""
    taken = set()
    for row, length in enumerate(LENGTHS):
        most = math.ceil(round(factor * length * NUM_CHOSEN / NUM_EXPERTS, 9))
        loads = [0] * NUM_EXPERTS
        for token in range(length):
            for expert in chosen[row, token].tolist():
                loads[expert] += 1
                if loads[expert] <= most:
                    taken.add((row, token, expert))
    return taken


@pytest.mark.parametrize("factor", [0.3, 0.7, 1.0])
def test_experts_take_the_first_tokens_of_a_row(factor: float) -> None:
    mlp, losses = watched(factor)
    states = torch.randn(3, 12, SHAPE.hidden_size, requires_grad=True)
    probabilities = (states @ mlp.gate.weight.T).softmax(-1)
    weights, chosen = probabilities.topk(NUM_CHOSEN)
    if SHAPE.setting("norm_topk_prob"):
        weights = weights / weights.sum(-1, keepdim=True)
    taken = taken_choices(chosen, factor)
    expected = torch.zeros_like(states)
    experts = mlp.experts
    for row, token, expert in taken:
        x = states[row, token]
        inner = F.silu(experts.gate_proj.weight[expert] @ x)
        y = experts.down_proj.weight[expert] @ (inner * (experts.up_proj.weight[expert] @ x))
        place = chosen[row, token].tolist().index(expert)
        one = torch.zeros(3, 12, 1)
        one[row, token] = 1
        expected = expected + one * y * weights[row, token, place]
    found = mlp(states, IS_TOKEN)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    factors = torch.randn(states.shape)
    inputs = (states, *mlp.parameters())
    own, right = (torch.autograd.grad((y * factors).sum(), inputs) for y in (found, expected))
    for gradient, expected_gradient in zip(own, right, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, atol=1e-4, rtol=1e-4)
    (measured, *_) = losses.read(losses.take().tolist(), 3)
    choices = sum(LENGTHS) * NUM_CHOSEN
    assert 0 < len(taken) < choices
    assert measured.dropped == pytest.approx(1 - len(taken) / choices)
    assert sum(measured.counts) == choices  # choices, also dropped ones


def test_nothing_is_dropped_without_a_capacity_and_without_gradients() -> None:
    states = torch.randn(2, 12, SHAPE.hidden_size)
    (mlp, losses), (whole, _), (wide, _) = watched(0.3), watched(None), watched(7.0)
    with torch.no_grad():
        assert torch.equal(mlp(states), whole(states))
    assert torch.equal(wide(states), whole(states))
    assert not torch.equal(mlp(states), whole(states))
    whole(states).sum().backward()
    assert not any(each.dropped for each in losses.read(losses.take().tolist(), 2))


def test_a_token_sees_no_later_tokens() -> None:
    mlp, _ = watched(0.7)
    states = torch.randn(1, 12, SHAPE.hidden_size)
    changed = torch.cat((states[:, :8], torch.randn(1, 4, SHAPE.hidden_size)), 1)
    torch.testing.assert_close(mlp(states)[:, :8], mlp(changed)[:, :8])


def test_a_factor_is_a_decimal_number() -> None:
    """In binary, 1.1 × 10 × 1 / 1 is more than 11."""
    capacity = ExpertCapacity(1.1, num_chosen=2)
    is_chosen = torch.zeros(1, 20, 4)
    is_chosen[..., :2] = 1  # an even share of 20 × 2 / 4
    assert capacity.kept(is_chosen, None).sum() == 2 * 11


@pytest.mark.parametrize("factor", [4 / 3, 1.1234567890123456])
def test_a_factor_has_as_many_digits_as_one_likes(factor: float) -> None:
    capacity = ExpertCapacity(factor, num_chosen=8)
    is_chosen = torch.zeros(1, 4096, 64)
    is_chosen[..., :8] = 1
    assert capacity.kept(is_chosen, None).sum() == 8 * math.ceil(factor * 4096 * 8 / 64)


def kept_on_ranks(is_chosen: Tensor, is_token: Tensor | None) -> tuple[Tensor, Tensor]:
    """Whether this rank's share of the choices is kept, by the ranks and by one process."""
    axis = Axis(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
    whole = ExpertCapacity(0.8, num_chosen=2).kept(is_chosen, is_token)
    capacity = ExpertCapacity(0.8, num_chosen=2, mesh=Mesh(context=axis))
    own_tokens = None if is_token is None else share(is_token, axis=axis)
    return capacity.kept(share(is_chosen, axis=axis), own_tokens), share(whole, axis=axis)


@pytest.mark.ranks
@pytest.mark.parametrize("fills", [False, True])
def test_ranks_that_share_rows_drop_as_one(fills: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    scores = torch.rand(3, 16, 5, generator=generator)
    is_chosen = torch.zeros_like(scores).scatter_(-1, scores.topk(2)[1], 1.0)
    is_token = torch.arange(16) < torch.tensor([16, 9, 0])[:, None] if fills else None
    of_ranks = spawn(kept_on_ranks, 4, is_chosen, is_token)
    for own, right in of_ranks:
        assert torch.equal(own, right)
    assert 0 < sum(int(own.sum()) for own, _ in of_ranks) < is_chosen.sum()
