"""Losses and gradients of a model on tensor-parallel ranks, compared with one process."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.model_loss import mean_loss
from tests.support.random_tensors import random_tensors
from tests.support.ranks import spawn
from tokamake import plugins
from tokamake.config.architecture import Architecture
from tokamake.parallel.axis import Axis, part
from tokamake.parallel.collectives import all_gather
from tokamake.parallel.mesh import Mesh
from tokamake.parallel.placement import Placement, placements

Architectures = dict[str, Architecture]
_ADDED_ONCE = re.compile(r"\.experts\..*bias|\.sinks$")
"""Tensors that start at 0, and that ranks could add several times."""


def tokens_of(architecture: Architecture, length: int) -> Tensor:
    """Random tokens (2, length)."""
    assert architecture.vocab_size is not None
    generator = torch.Generator().manual_seed(7)
    return torch.randint(architecture.vocab_size, (2, length), generator=generator)


Loss = Callable[[Any], Tensor]
"""Loss of a model, as the trainer computes it."""


def loss_of_tokens(model: Any) -> Tensor:
    """Mean loss of random tokens."""
    return mean_loss(model, tokens_of(model.architecture, 33))


def gradients_of(
    architecture: Architecture, mesh: Mesh, loss_of: Loss = loss_of_tokens
) -> tuple[float, dict[str, Tensor]]:
    """Loss and whole gradients of a model of this mesh."""
    weights = random_tensors(architecture, 1)
    generator = torch.Generator().manual_seed(2)
    for name, weight in weights.items():
        if _ADDED_ONCE.search(name):
            weight += 0.1 * torch.randn(weight.shape, generator=generator)
    model = plugins.load("models/*/model", architecture.family).Model(architecture, mesh)
    placement_of = placements(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            weight = weights[model.tensor_name(name)]
            parameter.copy_(cut(weight, placement_of[name], mesh.tensor))
        for name, buffer in model.named_buffers():
            buffer.copy_(weights[model.tensor_name(name)])
    loss = loss_of(model)
    loss.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient, placement = parameter.grad, placement_of[name]
        assert gradient is not None
        if placement.partial:
            dist.all_reduce(gradient, group=mesh.tensor.group)
        if placement.dim is not None:
            size = weights[model.tensor_name(name)].shape[placement.dim]
            gradient = _gathered(gradient, placement.dim, size, mesh.tensor)
        gradients[name] = gradient
    return loss.item(), gradients


@torch.no_grad()
def cut(whole: Tensor, placement: Placement, axis: Axis) -> Tensor:
    """This rank's part of a whole parameter, a view."""
    if placement.dim is None or axis.size == 1:
        return whole
    rows = part(whole.shape[placement.dim], axis)
    return whole.narrow(placement.dim, rows.start, len(rows))


def _gathered(gradient: Tensor, dim: int, size: int, axis: Axis) -> Tensor:
    """Join the parts of all ranks; the last part of an uneven dimension is padded first."""
    num_missing = -(-size // axis.size) - gradient.shape[dim]
    shape = [num_missing if d == dim else n for d, n in enumerate(gradient.shape)]
    padded = torch.cat((gradient, gradient.new_zeros(shape)), dim)
    return all_gather(padded, axis, dim=dim).narrow(dim, 0, size)


Losses = Sequence[tuple[Architectures, Loss]]
"""Architectures, each with a loss that it has."""


def _on_ranks(cases: Losses) -> list[dict[str, Any]]:
    """Losses and gradients on this rank, with and without sequence parallelism."""
    axis = Axis(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
    return [
        {
            f"{name}-{sequence}": gradients_of(
                shape, Mesh(tensor=axis, sequence_parallel=sequence), loss_of
            )
            for name, shape in architectures.items()
            for sequence in (False, True)
        }
        for architectures, loss_of in cases
    ]


def assert_tensor_parallel_equals_one_process(cases: Losses, world_size: int) -> None:
    """Check all cases on the same ranks: to start these takes longer than most cases."""
    ranks = spawn(_on_ranks, world_size, cases)
    for place, (architectures, loss_of) in enumerate(cases):
        for name, shape in architectures.items():
            expected = gradients_of(shape, Mesh(), loss_of)
            for case in (f"{name}-False", f"{name}-True"):
                for rank in ranks:
                    _assert_near(rank[place][case], expected, case=f"{shape.family} {case}")


def _assert_near(
    own: tuple[float, dict[str, Tensor]], expected: tuple[float, dict[str, Tensor]], *, case: str
) -> None:
    """Compare a loss and gradients of a rank with those of one process."""
    loss, gradients = expected
    largest = max(gradient.abs().max() for gradient in gradients.values())
    assert own[0] == pytest.approx(loss, rel=1e-6), case
    for key, gradient in gradients.items():
        torch.testing.assert_close(
            own[1][key], gradient, atol=1e-6 * largest, rtol=1e-4, msg=f"{case} {key}"
        )
