"""Optimizers against torch's, against packages and against their papers' formulas in numpy."""

import copy
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tokamake import plugins
from tokamake.config import OptimizerSettings
from tokamake.errors import UserError
from tokamake.optim import _rule, adafactor, lamb, muon, schedule_free_adamw, sophia_g
from tokamake.optim._groups import parameter_groups, set_rates
from tokamake.optim._whole import local

Arrays = dict[str, npt.NDArray[np.float64]]
Rule = Callable[[int, Any, Any, dict[str, Any], float], Any]

NAMES = plugins.names("optim")
RATES = [0.0, 0.05, 0.1, 0.08]
STEPS = len(RATES)


def start(dtype: torch.dtype = torch.float64) -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "embed.weight": (7, 4),
        "layers.0.wide.weight": (3, 5),
        "layers.0.tall.weight": (6, 4),
    }
    shapes |= {"layers.0.norm.weight": (4,), "head.weight": (7, 4)}
    values = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {name: torch.nn.Parameter(value.to(dtype)) for name, value in values.items()}


def gradients(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step + 1)
    found = {name: torch.randn(p.shape, generator=generator) for name, p in start().items()}
    return {name: value.double() * 0.3 for name, value in found.items()}


def make(name: str, parameters: dict[str, torch.nn.Parameter], **values: Any) -> Any:
    settings = OptimizerSettings(name=name, **values)
    groups = parameter_groups(parameters.items(), settings.used("weight_decay"))
    return plugins.load("optim", name).build(groups, settings)


def trained(name: str, *, dtype: torch.dtype = torch.float64, **values: Any) -> Arrays:
    """Parameters after some steps with rates that change."""
    parameters = start(dtype)
    optimizer = make(name, parameters, **values)
    decay = OptimizerSettings(name=name, **values).used("weight_decay")
    for step, rate in enumerate(RATES):
        walk(optimizer, parameters, gradients(step), rate=rate, decay=decay)
    if hasattr(optimizer, "eval"):
        optimizer.eval()
    return {each: parameter.detach().double().numpy() for each, parameter in parameters.items()}


def walk(
    optimizer: Any,
    parameters: dict[str, torch.nn.Parameter],
    gradients: dict[str, torch.Tensor],
    *,
    rate: float,
    decay: float,
) -> None:
    """One step, as the trainer does it."""
    if hasattr(optimizer, "train"):
        optimizer.train()
    for name, gradient in gradients.items():
        parameters[name].grad = gradient.to(parameters[name].dtype)
    set_rates(optimizer, learning_rate=rate, weight_decay=decay)
    optimizer.step()


def follow(rule: Rule, decay: float) -> Arrays:
    """Parameters after the same steps by a formula, which keeps what it likes in a dict."""
    found = {}
    for name, parameter in start().items():
        value, state = parameter.detach().numpy().copy(), dict[str, Any]()
        for step, rate in enumerate(RATES):
            gradient = gradients(step)[name].numpy()
            decays = decay if value.ndim > 1 else 0.0
            value = rule(step + 1, value, gradient, {"state": state, "decay": decays}, rate)
        found[name] = value
    return found


def assert_same(found: Arrays, expected: Arrays, rtol: float = 1e-7) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=rtol, atol=1e-9, err_msg=name)


def adam_moments(t: int, g: Any, seen: dict[str, Any], b1: float, b2: float, eps: float) -> Any:
    state = seen["state"]
    state["m"] = b1 * state.get("m", 0.0) + (1 - b1) * g
    state["v"] = b2 * state.get("v", 0.0) + (1 - b2) * g**2
    return state["m"] / (1 - b1**t) / (np.sqrt(state["v"] / (1 - b2**t)) + eps)


def adamw_rule(t: int, x: Any, g: Any, seen: dict[str, Any], rate: float) -> Any:
    return x - rate * (adam_moments(t, g, seen, 0.8, 0.9, 1e-3) + seen["decay"] * x)


def adam_rule(t: int, x: Any, g: Any, seen: dict[str, Any], rate: float) -> Any:
    return x - rate * adam_moments(t, g + seen["decay"] * x, seen, 0.8, 0.9, 1e-3)


def sgd_rule(t: int, x: Any, g: Any, seen: dict[str, Any], rate: float) -> Any:
    state = seen["state"]
    state["m"] = 0.8 * state.get("m", 0.0) + g + seen["decay"] * x
    return x - rate * state["m"]


def lion_rule(t: int, x: Any, g: Any, seen: dict[str, Any], rate: float) -> Any:
    m = seen["state"].get("m", 0.0)
    seen["state"]["m"] = 0.9 * m + 0.1 * g
    return x - rate * (np.sign(0.8 * m + 0.2 * g) + seen["decay"] * x)


def lamb_rule(t: int, x: Any, g: Any, seen: dict[str, Any], rate: float) -> Any:
    u = adam_moments(t, g, seen, 0.8, 0.9, 1e-3) + seen["decay"] * x
    ratio = np.linalg.norm(x) / np.linalg.norm(u) if x.ndim > 1 else 1.0
    return x - rate * ratio * u


def adopt_rule(t: int, x: Any, g: Any, seen: dict[str, Any], rate: float) -> Any:
    state = seen["state"]
    if t == 1:
        state.update(v=g**2, m=0.0)
        return x
    clip = (t - 1) ** 0.25
    scaled = np.clip(g / np.maximum(np.sqrt(state["v"]), 1e-3), -clip, clip)
    state["m"] = 0.8 * state["m"] + 0.2 * scaled
    state["v"] = 0.9 * state["v"] + 0.1 * g**2
    return x - rate * (state["m"] + seen["decay"] * x)


ADAM = {"beta1": 0.8, "beta2": 0.9, "epsilon": 1e-3}


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
def test_rule_is_that_of_its_paper(
    name: str, rule: Rule, values: dict[str, float], decay: float
) -> None:
    assert_same(trained(name, weight_decay=decay, **values), follow(rule, decay))


def reference(make_one: Callable[[Any], Any], decay: float) -> Arrays:
    """Parameters after the same steps by another optimizer, those that decay in the first group."""
    parameters = start()
    matrices = [p for p in parameters.values() if p.dim() > 1]
    vectors = [p for p in parameters.values() if p.dim() == 1]
    optimizer = make_one(
        [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    )
    for step, rate in enumerate(RATES):
        for name, gradient in gradients(step).items():
            parameters[name].grad = gradient
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    if hasattr(optimizer, "eval"):
        optimizer.eval()
    return {name: parameter.detach().numpy() for name, parameter in parameters.items()}


def test_adafactor_equals_torch() -> None:
    # torch bounds by epsilon where the paper adds it; no gradient here is so small.
    def theirs(groups: Any) -> torch.optim.Optimizer:
        return torch.optim.Adafactor(groups, eps=(1e-30, 1e-3), d=1.5, foreach=False)

    found = trained("adafactor", weight_decay=0.5, clip_threshold=1.5)
    assert_same(found, reference(theirs, 0.5))


def test_adafactor_takes_small_gradients() -> None:
    """Gradients of 1e-12, whose squared squares fp32 cannot hold, move as those of 1 do."""
    found = []
    for scale in (1.0, 1e-12):
        parameters = start(torch.float32)
        optimizer = make("adafactor", parameters)
        before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        scaled = {name: scale * gradient for name, gradient in gradients(0).items()}
        walk(optimizer, parameters, scaled, rate=0.1, decay=0.0)
        found.append({name: parameters[name].detach() - before[name] for name in before})
    for name, moved in found[0].items():
        torch.testing.assert_close(found[1][name], moved, rtol=1e-3, atol=1e-6)


def test_adafactor_keeps_little() -> None:
    parameters = start()
    optimizer = make("adafactor", parameters)
    walk(optimizer, parameters, gradients(0), rate=0.1, decay=0.0)
    state = optimizer.state[parameters["embed.weight"]]
    assert {name: tuple(value.shape) for name, value in state.items()} == {
        "step": (),
        "row_var": (7, 1),
        "col_var": (1, 4),
    }


def test_muon_equals_torch_on_hidden_matrices() -> None:
    def theirs(groups: Any) -> torch.optim.Optimizer:
        return torch.optim.Muon(groups[:1], momentum=0.9, adjust_lr_fn="match_rms_adamw")

    expected = reference(theirs, 0.5)
    found = trained("muon", weight_decay=0.5, momentum=0.9, **ADAM)
    adamw = follow(adamw_rule, 0.5)
    for name, value in found.items():
        hidden = name in ("layers.0.wide.weight", "layers.0.tall.weight")
        assert_same({name: value}, {name: (expected if hidden else adamw)[name]})


def test_muon_ratio_scales_hidden_matrices_alone() -> None:
    once, half = (trained("muon", matrix_learning_rate_ratio=ratio) for ratio in (1.0, 0.5))
    assert np.array_equal(once["head.weight"], half["head.weight"])
    assert not np.allclose(once["layers.0.wide.weight"], half["layers.0.wide.weight"])


@pytest.mark.parametrize("shape", [(8, 8), (4, 16), (16, 4)])
def test_orthogonal_brings_singular_values_near_one(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(shape) @ torch.diag(torch.logspace(0, -1, shape[1]))
    values = torch.linalg.svdvals(muon.orthogonal(matrix, 8).float())
    assert values.min() > 0.6
    assert values.max() < 1.3
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    # In the same directions as the matrix's own.
    cosines = (u.T @ muon.orthogonal(matrix, 8).float() @ v.T).diagonal()
    assert cosines.min() > 0.6


def test_schedule_free_equals_its_authors() -> None:
    schedulefree = pytest.importorskip("schedulefree", reason="pip install schedulefree")

    def theirs(groups: Any) -> Any:
        made = schedulefree.AdamWScheduleFree(groups, betas=(0.8, 0.9), eps=1e-3, foreach=False)
        made.train()
        return made

    found = trained("schedule_free_adamw", weight_decay=0.5, **ADAM)
    # Counts are fp32, as checkpoints hold them.
    assert_same(found, reference(theirs, 0.5), rtol=1e-5)


def test_schedule_free_switches_both_ways() -> None:
    parameters = start()
    optimizer = make("schedule_free_adamw", parameters)
    for step in range(3):
        walk(optimizer, parameters, gradients(step), rate=0.1, decay=0.1)
    y = {name: value.detach().clone() for name, value in parameters.items()}
    optimizer.eval()
    optimizer.eval()
    for name, parameter in parameters.items():
        z = optimizer.state[parameter]["z"]
        torch.testing.assert_close(0.9 * parameter + 0.1 * z, y[name])
        assert not torch.equal(parameter, y[name])
    optimizer.train()
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter.detach(), y[name])


def test_schedule_free_is_told_when_to_train() -> None:
    parameters = start()
    with pytest.raises(RuntimeError, match="train"):
        make("schedule_free_adamw", parameters).step()
    with pytest.raises(UserError, match="beta1: 0: schedule_free_adamw needs more"):
        make("schedule_free_adamw", parameters, beta1=0.0)


def test_sophia_follows_its_paper() -> None:
    values = {"beta1": 0.8, "beta2": 0.9, "rho": 0.05, "epsilon": 1e-6, "weight_decay": 0.5}
    parameters, labels = start(), 12
    optimizer = make("sophia_g", parameters, hessian_interval=2, **values)
    settings = OptimizerSettings(name="sophia_g", hessian_interval=2, **values)
    expected: Arrays = {name: p.detach().numpy().copy() for name, p in parameters.items()}
    m, h = ({name: np.zeros_like(x) for name, x in expected.items()} for _ in range(2))
    for step, rate in enumerate(RATES):
        due = sophia_g.needs_hessian(step, settings)
        assert due == (step in (0, 2))
        for name, sampled in gradients(step + 100).items():
            parameters[name].grad = sampled
            if due:
                h[name] = 0.9 * h[name] + 0.1 * labels * sampled.numpy() ** 2
        if due:
            optimizer.update_hessian(labels)
        walk(optimizer, parameters, gradients(step), rate=rate, decay=0.5)
        for name, x in expected.items():
            m[name] = 0.8 * m[name] + 0.2 * gradients(step)[name].numpy()
            update = np.clip(m[name] / np.maximum(0.05 * h[name], 1e-6), -1, 1)
            expected[name] = x - rate * (update + (0.5 if x.ndim > 1 else 0.0) * x)
    assert_same({name: p.detach().numpy() for name, p in parameters.items()}, expected)


def test_sophia_estimates_the_diagonal_of_gauss_and_newton() -> None:
    """Of a softmax of a linear layer, whose Hessian is known, as the mean of many samples."""
    torch.manual_seed(0)
    x, weight = torch.randn(6, 3), torch.nn.Parameter(torch.randn(4, 3))
    optimizer = make("sophia_g", {"weight": weight}, beta2=0.999)
    for _ in range(800):
        logits = x @ weight.T
        labels = torch.distributions.Categorical(logits=logits).sample()
        weight.grad = None
        torch.nn.functional.cross_entropy(logits, labels).backward()
        optimizer.update_hessian(len(x))
    p = (x @ weight.T).softmax(-1).detach()
    expected = torch.einsum("bk,bd->kd", p * (1 - p), x**2) / len(x)
    found = optimizer.state[weight]["hessian"] / (1 - 0.999**800)
    assert (found - expected).norm() < 0.2 * expected.norm()


def without_torchao(name: str) -> None:
    if name == "adamw_8bit":
        pytest.importorskip("torchao", reason="pip install torchao")


def test_8bit_stays_near_adamw() -> None:
    without_torchao("adamw_8bit")
    torch.manual_seed(0)
    begun = torch.randn(64, 128)
    found = []
    for name in ("adamw", "adamw_8bit"):
        weight = torch.nn.Parameter(begun.clone())
        optimizer = make(name, {"weight": weight})
        for step in range(20):
            torch.manual_seed(step)
            gradient = {"weight": weight.detach() + 0.1 * torch.randn(64, 128)}
            walk(optimizer, {"weight": weight}, gradient, rate=0.01, decay=0.1)
        found.append(weight.detach() - begun)
    assert optimizer.state[weight]["exp_avg"].codes.dtype == torch.uint8
    assert (found[1] - found[0]).norm() < 0.05 * found[0].norm()


def test_8bit_without_torchao_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(UserError, match=r"adamw_8bit: .*; run `pip install torchao`"):
        make("adamw_8bit", start())


@pytest.mark.parametrize("name", NAMES)
def test_state_is_what_the_plug_in_says(name: str) -> None:
    without_torchao(name)
    parameters = start(torch.float32)
    optimizer = make(name, parameters)
    walk(optimizer, parameters, gradients(0), rate=0.1, decay=0.1)
    said = plugins.load("optim", name).STATE
    seen = set()
    for parameter in parameters.values():
        for key, value in optimizer.state[parameter].items():
            seen.add(key)
            assert (value.shape == parameter.shape) == (said[key] == "like_parameter"), key
            assert value.dtype == torch.float32
    assert seen == set(said)
    assert set(said.values()) <= {"like_parameter", "replicated"}


@pytest.mark.parametrize("name", [name for name in NAMES if name != "adamw_8bit"])
def test_a_saved_state_goes_on_bit_for_bit(name: str) -> None:
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
def test_parameters_without_gradients_stay(name: str) -> None:
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


RATE = {"sgd": 0.5, "lamb": 0.05, "adafactor": 0.1, "lion": 0.01, "schedule_free_adamw": 0.05}


@pytest.mark.parametrize("name", NAMES)
def test_training_lowers_the_loss(name: str) -> None:
    """A small network learns to tell classes apart: from log 8 = 2.08 to less than a third."""
    without_torchao(name)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.LayerNorm(32), torch.nn.Linear(32, 8)
    )
    x = torch.randn(256, 16)
    labels = (x @ torch.randn(16, 8)).argmax(-1)
    values = {"learning_rate": RATE.get(name, 0.02)}
    settings = OptimizerSettings(name=name, **values)
    optimizer = make(name, dict(model.named_parameters()), **values)
    for step in range(120):
        if hasattr(optimizer, "train"):
            optimizer.train()
        if hasattr(optimizer, "update_hessian") and sophia_g.needs_hessian(step, settings):
            sampled = torch.distributions.Categorical(logits=model(x)).sample()
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), sampled).backward()
            optimizer.update_hessian(len(x))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), labels).backward()
        optimizer.step()
    if hasattr(optimizer, "eval"):
        optimizer.eval()
    assert torch.nn.functional.cross_entropy(model(x), labels).item() < math.log(8) / 3


def test_groups_decay_matrices_alone() -> None:
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
    # A group of an older checkpoint does not say whether it decays.
    for group in optimizer.param_groups:
        del group["decays"]
    set_rates(optimizer, learning_rate=0.5, weight_decay=0.25)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.25, 0.0]


def test_rules_update_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = trained("lamb")
    monkeypatch.setitem(_rule.AT_ONCE, "cpu", 16)
    assert_same(trained("lamb"), whole, rtol=0)
    assert local(torch.ones(2)).shape == (2,)
    assert {lamb.ELEMENTWISE, adafactor.ELEMENTWISE, muon.ELEMENTWISE} == {False}
    assert schedule_free_adamw.ELEMENTWISE


def test_8bit_moments_come_back_from_plain_numbers() -> None:
    without_torchao("adamw_8bit")
    parameter = torch.nn.Parameter(torch.linspace(-1, 1, 64 * 128).reshape(64, 128))
    optimizer: Any = make("adamw_8bit", {"weight": parameter})
    for number in range(3):
        gradient = {"weight": torch.sin(parameter.detach() * (number + 2))}
        walk(optimizer, {"weight": parameter}, gradient, rate=0.01, decay=0.1)
    for kind in ("exp_avg", "exp_avg_sq"):
        value = optimizer.state[parameter][kind]
        assert value.codes.dtype == torch.uint8
        plain = optimizer.plain(value)
        assert type(plain) is torch.Tensor
        again = optimizer.packed(parameter, kind, plain)
        assert again.codes.dtype == torch.uint8
        # Rounded once more, by a part of the largest of a block.
        assert (again.dequantize() - plain).abs().max() <= 0.01 * plain.abs().max()
