"""Compare optimizers with the formulas of their papers, in numpy."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.optimizers import ADAM, RATES, Arrays, assert_same, gradients, start, trained
from tokamake.optim import _optimizer_base, adafactor, lamb, muon, schedule_free_adamw
from tokamake.optim._sharded_parameters import local

Rule = Callable[[int, Any, Any, dict[str, Any], float], Any]


def follow(rule: Rule, decay: float) -> Arrays:
    """Parameters after the steps of `trained`, by a formula that stores its state in a dict."""
    values = {}
    for name, parameter in start().items():
        value, state = parameter.detach().numpy().copy(), dict[str, Any]()
        for step, rate in enumerate(RATES):
            gradient = gradients(step)[name].numpy()
            decays = decay if value.ndim > 1 else 0.0
            value = rule(step + 1, value, gradient, {"state": state, "decay": decays}, rate)
        values[name] = value
    return values


def adam_moments(t: int, g: Any, context: dict[str, Any], b1: float, b2: float, eps: float) -> Any:
    state = context["state"]
    state["m"] = b1 * state.get("m", 0.0) + (1 - b1) * g
    state["v"] = b2 * state.get("v", 0.0) + (1 - b2) * g**2
    return state["m"] / (1 - b1**t) / (np.sqrt(state["v"] / (1 - b2**t)) + eps)


def adamw_rule(t: int, x: Any, g: Any, context: dict[str, Any], rate: float) -> Any:
    return x - rate * (adam_moments(t, g, context, 0.8, 0.9, 1e-3) + context["decay"] * x)


def adam_rule(t: int, x: Any, g: Any, context: dict[str, Any], rate: float) -> Any:
    return x - rate * adam_moments(t, g + context["decay"] * x, context, 0.8, 0.9, 1e-3)


def sgd_rule(t: int, x: Any, g: Any, context: dict[str, Any], rate: float) -> Any:
    state = context["state"]
    state["m"] = 0.8 * state.get("m", 0.0) + g + context["decay"] * x
    return x - rate * state["m"]


def lion_rule(t: int, x: Any, g: Any, context: dict[str, Any], rate: float) -> Any:
    m = context["state"].get("m", 0.0)
    context["state"]["m"] = 0.9 * m + 0.1 * g
    return x - rate * (np.sign(0.8 * m + 0.2 * g) + context["decay"] * x)


def lamb_rule(t: int, x: Any, g: Any, context: dict[str, Any], rate: float) -> Any:
    u = adam_moments(t, g, context, 0.8, 0.9, 1e-3) + context["decay"] * x
    ratio = np.linalg.norm(x) / np.linalg.norm(u) if x.ndim > 1 else 1.0
    return x - rate * ratio * u


def adopt_rule(t: int, x: Any, g: Any, context: dict[str, Any], rate: float) -> Any:
    state = context["state"]
    if t == 1:
        state.update(v=g**2, m=0.0)
        return x
    clip = (t - 1) ** 0.25
    scaled = np.clip(g / np.maximum(np.sqrt(state["v"]), 1e-3), -clip, clip)
    state["m"] = 0.8 * state["m"] + 0.2 * scaled
    state["v"] = 0.9 * state["v"] + 0.1 * g**2
    return x - rate * (state["m"] + context["decay"] * x)


@pytest.mark.parametrize(
    ("name", "rule", "values"),
    [
        ("adamw", adamw_rule, ADAM),
        ("adam", adam_rule, ADAM),
        ("sgd", sgd_rule, {"momentum": 0.8}),
        ("lion", lion_rule, {"beta1": 0.8, "beta2": 0.9}),
        ("lamb", lamb_rule, ADAM),
        ("adopt", adopt_rule, ADAM),
    ],
)
@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_optimizers_follow_their_papers(
    name: str, rule: Rule, values: dict[str, float], decay: float
) -> None:
    assert_same(trained(name, weight_decay=decay, **values), follow(rule, decay))


def test_batches_do_not_change_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = trained("lamb")
    monkeypatch.setitem(_optimizer_base.AT_ONCE, "cpu", 16)
    assert_same(trained("lamb"), whole, rtol=0)
    assert local(torch.ones(2)).shape == (2,)
    assert {lamb.ELEMENTWISE, adafactor.ELEMENTWISE, muon.ELEMENTWISE} == {False}
    assert schedule_free_adamw.ELEMENTWISE
