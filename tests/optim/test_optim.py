"""Properties of all optimizers: states, checkpoints, groups, rates, and that training works."""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.optimizers import CASES, NAMES, extra_pass, gradients, make, start, trained, walk
from tokamake import plugins
from tokamake.optim._extra_pass import Relabel
from tokamake.optim._groups import parameter_groups, set_rates


@pytest.mark.parametrize("name", CASES)
def test_state_is_as_declared_by_the_plug_in(name: str) -> None:
    parameters = start(torch.float32)
    optimizer = make(name, parameters)
    walk(optimizer, parameters, gradients(0), rate=0.1, decay=0.1)
    declared = plugins.load("optim", name).STATE
    keys = set()
    for parameter in parameters.values():
        for key, value in optimizer.state[parameter].items():
            keys.add(key)
            assert (value.shape == parameter.shape) == (declared[key] == "like_parameter"), key
            assert value.dtype == torch.float32
    assert keys == set(declared)
    assert set(declared.values()) <= {"like_parameter", "replicated"}


@pytest.mark.parametrize("name", [name for name in NAMES if name != "adamw_8bit"])
def test_a_restored_state_continues_bit_for_bit(name: str) -> None:
    def steps(optimizer: Any, parameters: Any, numbers: range) -> None:
        for step in numbers:
            walk(optimizer, parameters, gradients(step), rate=0.01 * (step + 1), decay=0.1)
        if hasattr(optimizer, "eval"):
            optimizer.eval()

    parameters = start(torch.float32)
    optimizer = make(name, parameters)
    steps(optimizer, parameters, range(3))
    copies = {each: torch.nn.Parameter(p.detach().clone()) for each, p in parameters.items()}
    resumed = make(name, copies)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    steps(optimizer, parameters, range(3, 6))
    steps(resumed, copies, range(3, 6))
    for each, parameter in parameters.items():
        assert torch.equal(copies[each], parameter), each


@pytest.mark.parametrize("name", [name for name in NAMES if name != "adamw_8bit"])
def test_parameters_without_gradients_do_not_change(name: str) -> None:
    parameters = start()
    optimizer = make(name, parameters)
    before = parameters["embed.weight"].detach().clone()
    some = {each: value for each, value in gradients(1).items() if each != "embed.weight"}
    walk(optimizer, parameters, some, rate=0.1, decay=0.1)
    walk(optimizer, parameters, some, rate=0.1, decay=0.1)
    assert torch.equal(parameters["embed.weight"], before)
    assert not torch.equal(parameters["head.weight"], start()["head.weight"])


@pytest.mark.parametrize("name", ["lion", "lamb", "adafactor", "muon", "adopt", "sophia_g"])
def test_low_precision_parameters_have_wide_state(name: str) -> None:
    low, high = trained(name, dtype=torch.bfloat16), trained(name, dtype=torch.float32)
    parameters = start(torch.bfloat16)
    optimizer = make(name, parameters)
    walk(optimizer, parameters, gradients(0), rate=0.1, decay=0.1)
    state = optimizer.state[parameters["head.weight"]]
    assert {value.dtype for value in state.values()} == {torch.float32}
    for each, value in high.items():
        assert np.abs(low[each] - value).max() < 0.1


RATE = {
    "sgd": 0.5,
    "lamb": 0.05,
    "adafactor": 0.1,
    "lion": 0.01,
    "schedule_free_adamw": 0.05,
    "schedule_free_sgd": 1.0,
}


@pytest.mark.parametrize("name", CASES)
def test_training_lowers_the_loss(name: str) -> None:
    """A small network learns to classify: its loss falls from log 8 = 2.08 to less than a third."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.LayerNorm(32), torch.nn.Linear(32, 8)
    )
    x = torch.randn(256, 16)
    labels = (x @ torch.randn(16, 8)).argmax(-1)
    values = {"learning_rate": RATE.get(name, 0.02)}
    optimizer = make(name, dict(model.named_parameters()), **values)

    def relabelled_gradients(relabel: Relabel) -> int:
        optimizer.zero_grad()
        logits = model(x)
        torch.nn.functional.cross_entropy(logits, relabel(0, logits.detach())).backward()
        return len(x)

    for _ in range(120):
        if hasattr(optimizer, "train"):
            optimizer.train()
        if hasattr(optimizer, "prepare"):
            optimizer.prepare(extra_pass(relabelled_gradients, labels, vocab_size=8))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), labels).backward()
        optimizer.step()
    if hasattr(optimizer, "eval"):
        optimizer.eval()
    assert torch.nn.functional.cross_entropy(model(x), labels).item() < math.log(8) / 3


def test_only_matrices_decay() -> None:
    named = start()
    named["frozen"] = torch.nn.Parameter(torch.zeros(2, 2), requires_grad=False)
    decaying, plain = parameter_groups(named.items(), 0.5)
    assert decaying["weight_decay"] == 0.5
    assert decaying["param_names"] == [name for name in start() if "norm" not in name]
    assert all(
        p is named[n] for p, n in zip(decaying["params"], decaying["param_names"], strict=True)
    )
    assert plain["weight_decay"] == 0.0
    assert plain["param_names"] == ["layers.0.norm.weight"]


def test_groups_without_norms() -> None:
    groups = parameter_groups([("head.weight", start()["head.weight"])], 0.5)
    assert len(groups) == 1


def test_rates_reach_groups_that_decay() -> None:
    optimizer = make("adamw", start())
    set_rates(optimizer, learning_rate=0.25, weight_decay=0.0)
    set_rates(optimizer, learning_rate=0.5, weight_decay=0.125)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.125, 0.0]
    # Groups of older checkpoints have no key `decays`.
    for group in optimizer.param_groups:
        del group["decays"]
    set_rates(optimizer, learning_rate=0.5, weight_decay=0.25)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.25, 0.0]
