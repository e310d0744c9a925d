"""Compare optimizers that are not elementwise with torch's and their authors' packages."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.support.optimizers import (
    ADAM,
    assert_same,
    gradients,
    make,
    reference,
    start,
    trained,
    walk,
)
from tokamake.errors import UserError
from tokamake.optim import muon


def test_adafactor_equals_torch() -> None:
    # torch clamps to epsilon where the paper adds it; gradients here are larger than that.
    def theirs(groups: Any) -> torch.optim.Optimizer:
        return torch.optim.Adafactor(groups, eps=(1e-30, 1e-3), d=1.5, foreach=False)

    ours = trained("adafactor", weight_decay=0.5, clip_threshold=1.5)
    assert_same(ours, reference(theirs, 0.5))


def test_adafactor_supports_small_gradients() -> None:
    """Gradients of 1e-12, whose 4th power underflows in fp32, give the same update as 1."""
    updates = []
    for scale in (1.0, 1e-12):
        parameters = start(torch.float32)
        optimizer = make("adafactor", parameters)
        before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        scaled = {name: scale * gradient for name, gradient in gradients(0).items()}
        walk(optimizer, parameters, scaled, rate=0.1, decay=0.0)
        updates.append({name: parameters[name].detach() - before[name] for name in before})
    for name, update in updates[0].items():
        torch.testing.assert_close(updates[1][name], update, rtol=1e-3, atol=1e-6)


def test_adafactor_keeps_only_rows_and_columns() -> None:
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

    def adamw(groups: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, betas=(0.8, 0.9), eps=1e-3)

    hidden = ("layers.0.wide.weight", "layers.0.tall.weight")
    expected = reference(adamw, 0.5)
    expected |= {name: reference(theirs, 0.5)[name] for name in hidden}
    assert_same(trained("muon", weight_decay=0.5, momentum=0.9, **ADAM), expected)


def test_muon_ratio_scales_only_hidden_matrices() -> None:
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
    # Singular vectors have the same directions as those of the matrix.
    cosines = (u.T @ muon.orthogonal(matrix, 8).float() @ v.T).diagonal()
    assert cosines.min() > 0.6


def test_schedule_free_equals_its_authors() -> None:
    schedulefree = pytest.importorskip("schedulefree", reason="pip install schedulefree")

    def theirs(groups: Any) -> Any:
        adamw = schedulefree.AdamWScheduleFree(groups, betas=(0.8, 0.9), eps=1e-3, foreach=False)
        adamw.train()
        return adamw

    ours = trained("schedule_free_adamw", weight_decay=0.5, **ADAM)
    # Counts are fp32, as in checkpoints.
    assert_same(ours, reference(theirs, 0.5), rtol=1e-5)


def test_schedule_free_sgd_equals_its_authors() -> None:
    schedulefree = pytest.importorskip("schedulefree", reason="pip install schedulefree")

    def theirs(groups: Any) -> Any:
        sgd = schedulefree.SGDScheduleFree(groups, momentum=0.8, foreach=False)
        sgd.train()
        return sgd

    ours = trained("schedule_free_sgd", weight_decay=0.5, momentum=0.8)
    assert_same(ours, reference(theirs, 0.5), rtol=1e-5)


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


def test_schedule_free_needs_train_and_a_positive_momentum() -> None:
    parameters = start()
    with pytest.raises(RuntimeError, match="train"):
        make("schedule_free_adamw", parameters).step()
    with pytest.raises(UserError, match="beta1: 0: schedule_free_adamw needs more"):
        make("schedule_free_adamw", parameters, beta1=0.0)
    with pytest.raises(UserError, match="momentum: 0: schedule_free_sgd needs more"):
        make("schedule_free_sgd", parameters, momentum=0.0)
