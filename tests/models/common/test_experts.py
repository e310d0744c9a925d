"""Dispatch of tokens to experts: against a sum over all experts, and bit for bit again."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.support.dense import ARCHITECTURES
from tests.support.random_tensors import random_tensors
from tokamake.checkpoint.model_tensors import to_model
from tokamake.config.architecture import Architecture


def mixture(architecture: Architecture) -> Any:
    weights = {name: 10 * each for name, each in random_tensors(architecture, 1).items()}
    return to_model(architecture, weights).layers["0"].mlp  # type: ignore[index, union-attr]


def dense_sum(mlp: Any, x_ND: Tensor, architecture: Architecture) -> Tensor:
    """All experts of all tokens, times their weights, which are mostly 0."""
    probabilities = (x_ND @ mlp.gate.weight.T).softmax(-1)
    least = probabilities.sort(-1, descending=True).values
    chosen = probabilities >= least[:, architecture.setting("num_experts_per_tok") - 1, None]
    weights = probabilities * chosen
    if architecture.setting("norm_topk_prob"):
        weights = weights / weights.sum(-1, keepdim=True)
    gate, up, down = (
        getattr(mlp.experts, f"{each}_proj").weight for each in ("gate", "up", "down")
    )
    inner = F.silu(torch.einsum("nd,eid->nei", x_ND, gate)) * torch.einsum("nd,eid->nei", x_ND, up)
    return torch.einsum("nei,edi,ne->nd", inner, down, weights)


@pytest.mark.parametrize("name", ["mixtral", "mixtral-tied", "qwen3_moe-raw", "olmoe-scaled"])
@pytest.mark.parametrize("length", [1, 2, 40])
def test_experts_equal_a_weighted_sum_of_all_experts(name: str, length: int) -> None:
    architecture = ARCHITECTURES[name]
    mlp = mixture(architecture)
    x_BLD = torch.randn(2, length, architecture.hidden_size, requires_grad=True)
    factors = torch.randn(x_BLD.shape)
    inputs = (x_BLD, *mlp.parameters())
    results = [mlp(x_BLD), dense_sum(mlp, x_BLD.flatten(0, 1), architecture).view_as(x_BLD)]
    gradients = [torch.autograd.grad((each * factors).sum(), inputs) for each in results]
    for own, right in zip((results[0], *gradients[0]), (results[1], *gradients[1]), strict=True):
        torch.testing.assert_close(own, right, atol=1e-4, rtol=1e-4)


def test_no_token_is_dropped_if_all_choose_the_same_experts() -> None:
    architecture = ARCHITECTURES["qwen3_moe"]
    mlp = mixture(architecture)
    x_BLD = torch.randn(1, 1, architecture.hidden_size).expand(1, 50, -1).contiguous()
    torch.testing.assert_close(mlp(x_BLD), mlp(x_BLD[:, :1]).expand_as(x_BLD))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok: 9: more than the 8 of num_experts"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok: 0: too small; give 1 or more"),
        ({"num_experts": 0}, "num_experts: 0: too small; give 1 or more"),
    ],
)
def test_impossible_numbers_of_experts_are_refused(values: Any, message: str) -> None:
    shape = ARCHITECTURES["mixtral"].model_dump() | {"num_experts": 8}
    with pytest.raises(ValueError, match=message):
        Architecture(**shape | values)
