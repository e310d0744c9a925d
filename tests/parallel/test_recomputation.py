"""Activations are computed again once for each part of a backward pass, and then freed."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.ranks import spawn
from tests.train.stability.test_verification import PIPELINE, engine_of, step_of
from tokamake.parallel import recomputation
from tokamake.parallel.recomputation import backward_part, checkpoint


class CountedLayer:
    """A function with two weights that counts its calls."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.first, self.second = torch.randn(2, 5, 5, generator=generator).unbind()
        self.calls = 0
        for weight in (self.first, self.second):
            weight.requires_grad_()

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(torch.sin(x @ self.first) @ self.second)


def through(layers: list[CountedLayer], x: Tensor, *, recomputes: bool) -> Tensor:
    for layer in layers:
        x = checkpoint(layer, x) if recomputes else layer(x)
    return x


def gradients(layer: CountedLayer, *, recomputes: bool) -> list[Tensor]:
    """Gradients of the input, then of each weight, by a call of the engine for each."""
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(9)).requires_grad_()
    total = through([layer], x, recomputes=recomputes).square().sum()
    with backward_part():
        found = [*torch.autograd.grad(total, x, retain_graph=True)]
    with backward_part():
        for weight in (layer.first, layer.second):
            found += torch.autograd.grad(total, weight, retain_graph=True)
    return found


def test_a_layer_is_computed_once_in_each_part() -> None:
    layer = CountedLayer(1)
    found = gradients(layer, recomputes=True)
    assert layer.calls == 3
    assert all(map(torch.equal, found, gradients(layer, recomputes=False)))


def test_layers_hold_their_tensors_one_after_the_other() -> None:
    layers = [CountedLayer(number) for number in range(3)]
    x = torch.linspace(-1, 1, 15).view(3, 5).requires_grad_()
    total = through(layers, x, recomputes=True).sum()
    with backward_part():
        torch.autograd.grad(total, x)
        assert [layer.calls for layer in layers] == [2, 2, 2]
        assert len(recomputation._latest) == 1
    assert not recomputation._latest


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (
            torch.sin,
            r"saved torch.float32 of shape \(2,\) on cpu as tensor 1, and none when it was",
        ),
        (lambda x: torch.sin(torch.sin(x[:1])), r"as tensor 0, and .* of shape \(1,\) on cpu when"),
        (lambda x: torch.sin(torch.sin(x.double())), r"as tensor 0, and torch.float64 of shape"),
    ],
    ids=["number", "shape", "dtype"],
)
def test_a_layer_that_saves_other_tensors_is_refused(second: Any, message: str) -> None:
    is_first = True

    def changing(x: Tensor) -> Tensor:
        return torch.sin(torch.sin(x)) if is_first else second(x)

    y = checkpoint(changing, torch.ones(2, requires_grad=True))
    is_first = False
    with pytest.raises(RuntimeError, match=message):
        y.sum().backward()


def calls_of_layers(schedule: str) -> tuple[int, int]:
    """Calls of this rank's layers in a step, and the least possible number."""
    values: dict[str, Any] = {
        "parallel.pipeline_schedule": schedule,
        "parallel.virtual_pipeline_size": 2,
        "recompute_granularity": "full",
        "num_micro_batches": 4,
    }
    engine, calls = engine_of("llama", PIPELINE | values), 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    layers = [layer for stage in engine.stages.modules.values() for layer in stage.blocks]
    rows, samples = step_of(engine)
    for layer in layers:
        layer.register_forward_pre_hook(count)
    engine.train_step(rows, learning_rate=0.01, weight_decay=0.1, samples=samples)
    return calls, len(layers) * len(rows)


@pytest.mark.ranks
@pytest.mark.parametrize("schedule", ["interleaved_zero_bubble", "zbv"])
def test_pipelines_with_late_gradients_of_weights_compute_a_layer_three_times(
    schedule: str,
) -> None:
    for calls, passes in spawn(calls_of_layers, 2, schedule):
        assert 2 * passes < calls <= 3 * passes + 4  # shapes of states take further calls
