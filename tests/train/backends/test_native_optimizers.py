"""Every optimizer in the native engine: the same over ranks, bit by bit from a checkpoint."""

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from tests.support.engines import (
    RATES,
    assert_equal,
    build,
    coming,
    go,
    parts,
    states,
    weights,
    whole,
)
from tests.support.layouts import laid_out, parallel
from tests.support.ranks import spawn
from tests.support.runs import make_run, prepare
from tokamake import plugins
from tokamake.config.resolved_run import read_run
from tokamake.config.training import TrainSettings
from tokamake.parallel.loss import drawn
from tokamake.prove.engine_tensors import buffer, fragments

LEARNING_RATES = {
    "adam": 0.01, "adamw": 0.01, "sgd": 0.1, "lion": 1e-3, "adopt": 0.01, "lamb": 0.01,
    "adafactor": 0.01, "muon": 0.01, "schedule_free_adamw": 0.01, "sophia_g": 1e-3,
    "schedule_free_sgd": 0.1,
}  # fmt: skip
MORE = {"sophia_g": {"hessian_interval": 3}}
ROUNDS = {"muon": 1e-3}
"""Relative differences of losses above 1e-4: Muon orthogonalizes in bf16."""
ALONE = [
    name
    for name in LEARNING_RATES
    if plugins.constant("optim", name, "ELEMENTWISE") and name != "sophia_g"  # it draws labels
]
"""Optimizers that update each number by itself."""
LAYOUTS: dict[int, list[dict[str, Any]]] = {
    1: [{}],
    2: [{"zero_stage": 2}, parallel(tp=2, sp=True), parallel(cp=2)],
}
OWNED: dict[int, list[dict[str, Any]]] = {
    4: [
        parallel(tp=2),
        {"zero_stage": 3} | parallel(tp=2, sp=True),
        {"micro_batch_size": 2} | parallel(replicas=2),
    ],
    8: [{"zero_stage": 1, "micro_batch_size": 2} | parallel(tp=2, pp=2)],
}
"""Layouts in which two axes of ranks divide a matrix, or one divides each of two copies; with
pipelines, the ranks of each stage divide the matrices of that stage."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = prepare(tmp_path_factory.mktemp("optimizers"), train_samples=200)
    return make_run(root, "run", backend="native", train_steps=20, micro_batch_size=4)


def of_optimizer(name: str) -> dict[str, Any]:
    """Settings of the section `train`."""
    rate = LEARNING_RATES[name]
    return {
        "optimizer": {"name": name, "learning_rate": rate, **MORE.get(name, {})},
        "schedule": {"name": "constant"},
    }


def train_all(config: Path, layouts: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    """Train with each optimizer at each layout; save halfway, and resume from there, too."""
    return {
        name: [
            train(config, name, layout, folder / f"{name}{number}")
            for number, layout in enumerate(layouts_of(name, layouts))
        ]
        for name in LEARNING_RATES
    }


def layouts_of(name: str, layouts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All layouts; of optimizers that update each number by itself, one each, in turn."""
    if name not in ALONE:
        return layouts
    place = ALONE.index(name) % len(layouts)
    return layouts[place : place + 1]


def train(config: Path, name: str, layout: dict[str, Any], folder: Path) -> dict[str, Any]:
    run = laid_out(read_run(config), of_optimizer(name) | layout)
    rate = {"learning_rate": LEARNING_RATES[name]}
    engine = build(run)
    remaining = coming(engine, run)
    losses = go(engine, remaining, 4, **rate)
    engine.save(folder, {"iteration": 4, "consumed_samples": 32, "consumed_tokens": 512}).wait()
    losses += go(engine, remaining, 4, **rate)
    validation = engine.validate(iter(next(coming(engine, run)).micro_batches)).loss
    loaded = build(run)
    loaded.load(folder)
    assert go(loaded, coming(loaded, run, done=4), 4, **rate) == losses[4:], name
    assert loaded.validate(iter(next(coming(loaded, run)).micro_batches)).loss == validation
    assert_equal(weights(loaded), weights(engine))
    assert_equal(states(loaded), states(engine))
    assert {key.split()[1] for key in states(engine)} <= set(engine._state_kinds)
    chunks = [part for each in fragments(engine) for part in parts(each, buffer(each))]
    return {"losses": losses, "validation": validation, "weights": chunks}


@pytest.mark.grid
@pytest.mark.ranks
def test_optimizers_train_the_same_over_ranks(config: Path, tmp_path: Path) -> None:
    results = {
        size: spawn(train_all, size, config, layouts, tmp_path / str(size), timeout=500)
        for size, layouts in LAYOUTS.items()
    }
    for name in LEARNING_RATES:
        ((alone,),) = (of_rank[name] for of_rank in results[1])
        assert alone["losses"][-1] < alone["losses"][0], name
        assert alone["validation"] < alone["losses"][0], name
        layouts = layouts_of(name, LAYOUTS[2])
        for at_layouts in zip(layouts, *(of_rank[name] for of_rank in results[2]), strict=True):
            for of_rank in at_layouts[1:]:
                message, rel = f"{name} {at_layouts[0]}", ROUNDS.get(name, 1e-4)
                for key in ("losses", "validation"):
                    assert of_rank[key] == pytest.approx(alone[key], rel=rel), message


def train_muon(config: Path, layouts: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    # In bf16, differences of 1e-7 in gradients become 1e-2 in directions, on some processors.
    torch.Tensor.bfloat16 = torch.Tensor.float  # type: ignore[method-assign, assignment]
    return [train(config, "muon", each, folder / str(n)) for n, each in enumerate(layouts)]


@pytest.mark.grid
@pytest.mark.ranks
@pytest.mark.parametrize("size", OWNED)
def test_owners_of_matrices_train_the_same(config: Path, tmp_path: Path, size: int) -> None:
    ((alone,),) = spawn(train_muon, 1, config, LAYOUTS[1], tmp_path / "1")
    of_ranks = spawn(train_muon, size, config, OWNED[size], tmp_path / str(size))
    expected = whole([alone["weights"]])
    for layout, *results in zip(OWNED[size], *of_ranks, strict=True):
        for result in results:
            for key in ("losses", "validation"):
                assert result[key] == pytest.approx(alone[key], rel=ROUNDS["muon"]), layout
        for name, actual in whole(result["weights"] for result in results).items():
            difference = (actual - expected[name]).norm() / expected[name].norm()
            assert difference < ROUNDS["muon"], (name, layout)


def hessian(config: Path) -> None:
    """Sophia's Hessian after its first step, against a plain backward pass."""
    run = laid_out(read_run(config), of_optimizer("sophia_g"))
    engine = build(run)
    first, second = (next(coming(engine, run, done=done)) for done in (0, 1))
    tokens = torch.from_numpy(np.concatenate(first.micro_batches))[:, :-1]
    (model,) = engine.stages.modules.values()
    logits = model(tokens).flatten(0, 1)
    chances = np.random.default_rng((run.seed, 0)).random(tokens.numel(), dtype=np.float32)
    before = logits.detach().double().softmax(-1).cumsum(-1).numpy()
    labels = torch.tensor(
        [int((row < chance).sum()) for row, chance in zip(before, chances, strict=True)]
    )
    torch.nn.functional.cross_entropy(logits, labels).backward()
    expected = {
        # beta2 of its SETTINGS is 0.99.
        name: 0.01 * tokens.numel() * parameter.grad.square()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    model.zero_grad()
    due, update = [], engine.optimizer.update_hessian
    engine.optimizer.update_hessian = lambda count: (due.append(count), update(count))
    engine.train_step(first.micro_batches, **RATES)
    for chunk in engine._chunks:
        actual = engine.optimizer.state[chunk.local]["hessian"]
        torch.testing.assert_close(actual, expected[chunk.name], rtol=1e-3, atol=1e-12)
    for step in chain([second], coming(engine, run, done=2)):
        engine.train_step(step.micro_batches, **RATES)
        if all(state["step"] == 7 for state in engine.optimizer.state.values()):
            break
    assert due == [tokens.numel()] * 3  # before the updates after 0, 3 and 6


@pytest.mark.ranks
def test_the_hessian_uses_drawn_labels(config: Path) -> None:
    spawn(hessian, 1, config)


def test_drawn_labels_follow_the_predictions() -> None:
    logits = torch.tensor([0.0, 2.0, -torch.inf, 1.0, -1.0])
    number = 100_000
    chances = torch.from_numpy(np.random.default_rng(3).random(number, dtype=np.float32))
    labels = drawn(logits.expand(number, -1), chances, size=5)
    shares = torch.bincount(labels, minlength=5) / number
    torch.testing.assert_close(shares, logits.softmax(-1), rtol=0, atol=0.01)
    assert shares[2] == 0
    ends = torch.tensor([0.0, np.nextafter(np.float32(1), np.float32(0))])
    assert drawn(logits.expand(2, -1), ends, size=5).tolist() == [0, 4]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            parallel(pp=2),
            "optimizer.name: sophia_g: .* which only the last pipeline stage has; set",
        ),
        ({"backend": "deepspeed"}, "optimizer.name: sophia_g: .* set backend to native"),
    ],
)
def test_sophia_is_refused_where_no_extra_pass_is_possible(
    changes: dict[str, Any], message: str
) -> None:
    values = {"train_steps": 9, **of_optimizer("sophia_g"), **changes}
    with pytest.raises(ValidationError, match=message):
        TrainSettings.model_validate(values)
