"""Routers: groups of experts by a plain loop, biases that balance them."""

from typing import Any

import pytest
import torch

from tests.support.dense import latent
from tests.support.random_tensors import random_tensors
from tokamake.checkpoint.model_tensors import to_model
from tokamake.config.architecture import Architecture
from tokamake.models.common.routers import BalancedRouter
from tokamake.parallel.mesh import SINGLE_RANK

SHAPE = latent(n_group=3, topk_group=2, num_experts=9, num_experts_per_tok=4)


def router(**values: Any) -> BalancedRouter:
    shape = Architecture(**SHAPE.model_dump() | values)
    weights = {name: 20 * each for name, each in random_tensors(shape, 1).items()}
    gate: BalancedRouter = to_model(shape, weights).layers["1"].mlp.gate  # type: ignore[index, union-attr]
    return gate


def test_experts_are_chosen_by_biased_scores_in_the_best_groups() -> None:
    gate = router()
    with torch.no_grad():
        gate.e_score_correction_bias.copy_(torch.linspace(0.3, -0.3, 9))
    states = torch.randn(40, SHAPE.hidden_size)
    with torch.no_grad():
        choices = gate(states)
    scores = (states @ gate.weight.detach().T).sigmoid()
    biased = scores + gate.e_score_correction_bias
    differ = 0
    for token, own in enumerate(choices.chosen_NK.tolist()):
        of_groups = [biased[token, 3 * n : 3 * n + 3].sort(descending=True)[0] for n in range(3)]
        best = sorted(range(3), key=lambda n: -float(of_groups[n][:2].sum()))[:2]
        usable = [expert for expert in range(9) if expert // 3 in best]
        right = sorted(usable, key=lambda expert: -float(biased[token, expert]))[:4]
        assert sorted(own) == sorted(right)
        differ += sorted(own) != sorted(scores[token].topk(4)[1].tolist())
        weights = scores[token, own] / scores[token, own].sum() * 2.5
        torch.testing.assert_close(choices.weights_NK[token], weights)
    assert differ > 5
    torch.testing.assert_close(choices.probabilities_NE.sum(-1), torch.ones(40))


def test_a_bias_follows_the_sign_of_what_is_missing_to_the_mean() -> None:
    gate = router()
    gate.balance(torch.tensor([0.0, 3, 3, 3, 3, 3, 3, 3, 6]), rate=0.5)
    gate.balance(torch.tensor([0.0, 9, 0, 0, 0, 0, 0, 0, 0]), rate=0.25)
    assert gate.e_score_correction_bias.tolist() == [0.75, -0.25, *[0.25] * 6, -0.25]


def test_biases_stay_fp32_and_have_no_gradient() -> None:
    gate = router().bfloat16()
    assert gate.weight.dtype == torch.bfloat16
    assert gate.e_score_correction_bias.dtype == torch.float32
    gate(torch.randn(5, SHAPE.hidden_size, dtype=torch.bfloat16)).weights_NK.sum().backward()
    assert gate.weight.grad is not None
    assert not gate.e_score_correction_bias.requires_grad
    with torch.device("meta"):
        empty = BalancedRouter(SHAPE, SINGLE_RANK).bfloat16()
    moved = empty.to_empty(device="cpu").e_score_correction_bias
    assert (moved.device.type, moved.dtype) == ("cpu", torch.float32)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"n_group": 4}, "n_group: 4: does not divide the 9 of num_experts"),
        ({"topk_group": 4}, "topk_group: 4: more than the 3 of n_group; lower it"),
        ({"topk_group": 1}, "num_experts_per_tok: 4: 1 groups have 3 experts; lower it"),
        ({"first_k_dense_replace": 3}, "first_k_dense_replace: 3: none of the 3 layers would have"),
        ({"n_shared_experts": -1}, "n_shared_experts: -1: too small; give 0 or more"),
        ({"v_head_dim": 0}, "v_head_dim: 0: too small; give 1 or more"),
        ({"qk_rope_head_dim": 5, "head_dim": 13}, "qk_rope_head_dim: 5: is odd; rotary needs"),
        ({"head_dim": 20}, "head_dim: 20: is the sum of .*, 14; remove it"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3: .*; give 6, or remove it"),
        ({"q_lora_rank": -1}, "q_lora_rank: -1: too small; give 0 or more"),
    ],
)
def test_impossible_settings_are_refused(values: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Architecture(**SHAPE.model_dump() | values)
