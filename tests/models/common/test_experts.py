"""Dispatch of tokens to experts: against a sum over all experts, and bit for bit again."""

import math
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
    for name, each in weights.items():
        if name.endswith("bias"):
            torch.nn.init.normal_(each, std=0.3)
    return to_model(architecture, weights).layers["0"].mlp  # type: ignore[index, union-attr]


def dense_sum(mlp: Any, x_ND: Tensor, architecture: Architecture) -> Tensor:
    """All experts of all tokens, times their weights, which are mostly 0."""
    number = architecture.setting("num_experts")
    biases = [getattr(mlp.experts, f"{each}_proj").bias for each in ("gate", "up", "down")]
    of_router, of_gate, of_up, of_down = (
        torch.zeros(number, 1) if each is None else each for each in (mlp.gate.bias, *biases)
    )
    probabilities = (x_ND @ mlp.gate.weight.T + of_router.flatten()).softmax(-1)
    least = probabilities.sort(-1, descending=True).values
    chosen = probabilities >= least[:, architecture.setting("num_experts_per_tok") - 1, None]
    weights = probabilities * chosen
    if architecture.setting("norm_topk_prob"):
        weights = weights / weights.sum(-1, keepdim=True)
    gate, up, down = (
        getattr(mlp.experts, f"{each}_proj").weight for each in ("gate", "up", "down")
    )
    gates = torch.einsum("nd,eid->nei", x_ND, gate) + of_gate
    ups = torch.einsum("nd,eid->nei", x_ND, up) + of_up
    own = architecture.model_extra or {}
    if limit := own.get("swiglu_limit"):
        gates, ups = torch.minimum(gates, torch.tensor(limit)), ups.clip(-limit, limit)
        inner = gates / (1 + torch.exp(-own["swiglu_alpha"] * gates)) * (ups + 1)
    else:
        inner = F.silu(gates) * ups
    results = torch.einsum("nei,edi->ned", inner, down) + of_down
    return torch.einsum("ned,ne->nd", results, weights)


@pytest.mark.parametrize("name", ["mixtral", "mixtral-tied", "olmoe-scaled", "gpt_oss"])
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


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("gpt_oss", "swiglu_alpha"),
        ("gpt_oss", "swiglu_limit"),
        ("deepseek_v2", "routed_scaling_factor"),
    ],
)
def test_settings_above_zero_alone_are_accepted(family: str, name: str) -> None:
    for value in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"{name}: {value}: not a positive number; give"):
            Architecture(**ARCHITECTURES[family].model_dump() | {name: value})


def test_sinks_and_biases_start_at_zero_and_norms_at_one() -> None:
    tensors = random_tensors(ARCHITECTURES["gpt_oss"], 1)
    added = {name: each for name, each in tensors.items() if name.endswith(("bias", ".sinks"))}
    assert len(added) == 3 * 9
    assert not any(each.any() for each in added.values())
    assert all(each.eq(1).all() for name, each in tensors.items() if "norm" in name)
