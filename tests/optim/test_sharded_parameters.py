"""Optimizers that need whole parameters give the same result for any division of parameters."""

import itertools
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.optimizers import NAMES, RATES, gradients, make, start, trained, walk
from tests.support.ranks import spawn
from tests.support.traffic import WireBytes
from tokamake import plugins
from tokamake.config.optimization import OptimizerSettings
from tokamake.optim import _optimizer_base
from tokamake.optim._groups import parameter_groups
from tokamake.optim._sharded_parameters import UNSHARDED, ParameterShard, WholeParameters, part_of
from tokamake.runtime.torch_internals import group_timeout, set_group_timeouts

NOT_ELEMENTWISE = [name for name in NAMES if not plugins.load("optim", name).ELEMENTWISE]
NOT_ELEMENTWISE.remove("adamw_8bit")


class Threads(WholeParameters):
    """`WholeParameters` of ranks that are threads of one process; sums use a shared list."""

    def __init__(self, parts: dict[int, ParameterShard], rank: int, group: "ThreadGroup") -> None:
        super().__init__(lambda parameter: parts[id(parameter)])
        self._rank, self._group = rank, group

    def rank(self, _: Any) -> int:
        return self._rank

    def size(self, _: Any) -> int:
        return self._group.size

    def add_up(self, values: Tensor, _: Any) -> None:
        values.copy_(torch.stack(self._group.all_gather(self._rank, values.clone())).sum(0))

    def all_gather_object(self, value: Any, _: Any) -> list[Any]:
        return self._group.all_gather(self._rank, value)

    def exchange(self, sent: list[Tensor], sizes: list[int], _: Any) -> list[Tensor]:
        received = [each[self._rank] for each in self._group.all_gather(self._rank, sent)]
        assert [len(each) for each in received] == sizes
        return received


class ThreadGroup:
    """All-gather over threads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._values: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=300)

    def all_gather(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values


GROUPS = ("the others",)
"""Stand-in for process groups."""


def quarters(shape: tuple[int, ...]) -> list[ParameterShard]:
    """Divide a matrix unequally along both dimensions, or a vector unequally, one part empty."""
    if len(shape) == 1:
        bounds = [0, 1, 3, 3, shape[0]]
        return [
            ParameterShard(shape, (slice(a, b),), GROUPS) for a, b in itertools.pairwise(bounds)
        ]
    rows, columns = (slice(0, 2), slice(2, shape[0])), (slice(0, 1), slice(1, shape[1]))
    return [ParameterShard(shape, (row, column), GROUPS) for row in rows for column in columns]


def replicated(shape: tuple[int, ...]) -> list[ParameterShard]:
    return [ParameterShard(shape, tuple(slice(0, size) for size in shape))] * 4


def trained_in_threads(name: str) -> dict[str, Tensor]:
    """Whole parameters after the steps of `trained`, by four threads with a part each."""
    whole = {each: parameter.detach().clone() for each, parameter in start().items()}
    # As with tensor parallelism, norms are replicated.
    parts = {
        each: (replicated if "norm" in each and name == "muon" else quarters)(tuple(value.shape))
        for each, value in whole.items()
    }
    group, failures = ThreadGroup(4), []

    def rank(number: int) -> None:
        try:
            held = {each: parts[each][number] for each in whole}
            own = {each: whole[each][part.place] for each, part in held.items()}
            parameters = {each: torch.nn.Parameter(value.clone()) for each, value in own.items()}
            view = Threads({id(parameters[each]): held[each] for each in held}, number, group)
            settings = OptimizerSettings(name=name)
            groups = parameter_groups(parameters.items(), settings.used("weight_decay"))
            optimizer = plugins.load("optim", name).build(groups, settings, whole=view)
            for step, rate in enumerate(RATES):
                local = {each: g[held[each].place] for each, g in gradients(step).items()}
                walk(optimizer, parameters, local, rate=rate, decay=settings.used("weight_decay"))
            for each, part in held.items():
                whole[each][part.place] = parameters[each].detach()
        except Exception as error:
            failures.append(error)
            group._barrier.abort()

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    return whole


@pytest.mark.parametrize("name", NOT_ELEMENTWISE)
def test_parts_along_any_dimension_equal_the_whole(name: str) -> None:
    expected = trained(name)
    for each, value in trained_in_threads(name).items():
        np.testing.assert_allclose(value.numpy(), expected[each], rtol=1e-9, err_msg=each)


@pytest.mark.parametrize("name", NOT_ELEMENTWISE)
def test_parts_without_sums_differ_from_the_whole(name: str) -> None:
    """Shows that the other tests here can fail: rows are updated without the others."""
    parameters = start()
    halves = {each: torch.nn.Parameter(p.detach()[:2].clone()) for each, p in parameters.items()}
    optimizer = make(name, halves)
    for step, rate in enumerate(RATES):
        rows = {each: gradient[:2] for each, gradient in gradients(step).items()}
        decay = OptimizerSettings(name=name).used("weight_decay")
        walk(optimizer, halves, rows, rate=rate, decay=decay)
    wide = "layers.0.wide.weight"
    assert not np.allclose(halves[wide].detach().numpy(), trained(name)[wide][:2], rtol=1e-3)


def test_tensors_that_are_not_sharded_are_returned_as_they_are() -> None:
    value = torch.ones(2, 3)
    assert part_of(value) == ParameterShard((2, 3), (slice(0, 2), slice(0, 3)))
    (doubled,) = UNSHARDED.on_owners([value], [value], function=lambda whole: 2 * whole)
    assert torch.equal(doubled, 2 * value)
    assert torch.equal(UNSHARDED.part(value, torch.ones(2, 1)), torch.ones(2, 1))


def fully_sharded(names: list[str]) -> list[tuple[dict[str, Tensor], dict[str, list[str]]]]:
    """Whole parameters after the same steps on FSDP2's DTensors, and the kinds of their state."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    results = []
    for name in names:
        parameters = {
            each: torch.nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)]))
            for each, p in start(torch.float32).items()
        }
        optimizer = make(name, parameters)
        for step, rate in enumerate(RATES):
            sharded = {
                each: distribute_tensor(gradient.float(), mesh, [Shard(0)])
                for each, gradient in gradients(step).items()
            }
            decay = OptimizerSettings(name=name).used("weight_decay")
            walk(optimizer, parameters, sharded, rate=rate, decay=decay)
        if hasattr(optimizer, "eval"):
            optimizer.eval()
        state: dict[str, list[str]] = {"like_parameter": [], "replicated": []}
        for each in optimizer.state[parameters["head.weight"]].items():
            state["like_parameter" if isinstance(each[1], DTensor) else "replicated"] += [each[0]]
        whole = {each: p.full_tensor().detach() for each, p in parameters.items()}  # type: ignore[attr-defined]
        results.append((whole, state))
    return results


@pytest.mark.ranks
def test_fully_sharded_parameters_equal_the_whole() -> None:
    """All optimizers on the DTensors of FSDP2; with 3 ranks, parts are unequal or empty."""
    names = [name for name in NAMES if name != "adamw_8bit"]
    for results in spawn(fully_sharded, 3, names):
        for name, (parameters, state) in zip(names, results, strict=True):
            expected = trained(name, dtype=torch.float32)
            for each, value in parameters.items():
                np.testing.assert_allclose(
                    value.numpy(), expected[each], rtol=1e-5, atol=1e-6, err_msg=f"{name} {each}"
                )
            declared = plugins.load("optim", name).STATE
            for kind, keys in state.items():
                assert all(declared[key] == kind for key in keys), (name, kind, keys)


def counted(shapes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Bytes that this rank sends and elements that it computes with, for two orders of axes.

    Two axes of ranks divide matrices along two dimensions.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    def function(matrix: Tensor) -> Tensor:
        nonlocal computed
        computed += matrix.numel()
        return matrix.cumsum(0).cumsum(1)

    world, counts = dist.get_world_size(), []
    torch.manual_seed(0)
    wholes = [torch.randn(shape) for shape in shapes]
    for sizes in ((world // 2, 2), (2, world // 2)):
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("data", "tensor"))
        parameters = [distribute_tensor(whole, mesh, [Shard(0), Shard(1)]) for whole in wholes]
        parts, computed = [each.to_local().clone() for each in parameters], 0
        whole = WholeParameters()
        whole.on_owners(parameters, parts, function=torch.neg)  # it learns where parts are
        with WireBytes() as wire:
            results = whole.on_owners(parameters, parts, function=function)
        assert set(wire.sent) == {"alltoall_base_"}
        counts.append((wire.sent.total(), computed))
        for result, matrix in zip(results, wholes, strict=True):
            expected = distribute_tensor(matrix.cumsum(0).cumsum(1), mesh, [Shard(0), Shard(1)])
            torch.testing.assert_close(result, expected.to_local())
            assert result.shape == expected.to_local().shape
    return counts


@pytest.mark.ranks
def test_parts_travel_once_to_the_owners_and_back() -> None:
    """For data-parallel with tensor-parallel ranks: no sums of whole matrices, equal work."""
    shapes = [(12, 8), (8, 12), (12, 8), (6, 16), (16, 6), (12, 8)] * 2
    num_elements = sum(rows * columns for rows, columns in shapes)
    for counts in zip(*spawn(counted, 6, shapes), strict=True):
        assert {computed for _, computed in counts} == {num_elements // 6}
        expected = 2 * 4 * num_elements * 5 / 6
        assert 0.99 * expected < sum(sent for sent, _ in counts) < 1.01 * expected


def joined_timeouts() -> list[float]:
    """Time-outs in seconds of the groups that owners of matrices need."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    set_group_timeouts(77)  # as a run does before its first step
    parameter = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Shard(1)])
    whole = WholeParameters()
    whole.on_owners([parameter], [parameter.to_local()], function=torch.neg)
    (joined,) = whole._joined.values()
    assert dist.get_process_group_ranks(joined) == [0, 1, 2, 3]
    return [group_timeout(group).total_seconds() for group in (joined, mesh.get_group("data"))]


@pytest.mark.ranks
def test_the_group_of_all_holders_has_the_timeout_of_the_others() -> None:
    assert spawn(joined_timeouts, 4) == [[77, 77]] * 4


@pytest.mark.parametrize(("name", "length"), [("muon", 4), ("lamb", 1)])
def test_a_batch_has_a_matrix_for_each_owner(
    name: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However large the matrices are: else one rank would compute while the others wait."""
    monkeypatch.setitem(_optimizer_base.AT_ONCE, "cpu", 6)
    matrices = {f"layers.{n}.weight": torch.nn.Parameter(torch.ones(4, 6)) for n in range(8)}
    held = {id(each): quarters((4, 6))[0] for each in matrices.values()}
    groups = parameter_groups(matrices.items(), 0.1)
    optimizer = plugins.load("optim", name).build(
        groups, OptimizerSettings(name=name), whole=Threads(held, 0, ThreadGroup(4))
    )
    for each in matrices.values():
        each.grad = torch.ones(4, 6)
    batches = [*optimizer.batches(optimizer.param_groups[0])]
    assert [len(batch.parameters) for batch in batches] == [length] * (8 // length)
