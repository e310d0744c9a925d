"""Training on an accelerator, which a stand-in plays: every objective has the numbers of the CPU.

The stand-in counts what a step costs. It joins no objective by name: whatever makes random samples
is trained here.
"""

import ast
import pickle
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import standin_device, standin_use
from tests.support.paths import MODULES, PACKAGE
from tests.support.ranks import spawn
from tests.support.shared_folders import made_once
from tests.support.standin_costs import counted
from tests.support.standin_training import (
    LAYOUTS,
    PASSES,
    RUNS,
    Trained,
    engine_of,
    layout,
    one_rank,
    part_of,
    train_by_deepspeed,
    train_layouts,
    train_on_both,
    train_with_passes,
    waits_of_experts,
)
from tokamake.runtime.device import device_memory
from tokamake.runtime.device_types import DEVICE_TYPES
from tokamake.runtime.ranks import Ranks
from tokamake.train.random_state import random_state, seed_all, set_random_state

ByName = dict[str, tuple[Trained, Trained]]
"""Trainings on the CPU and on the stand-in."""


def trained_once(
    factory: pytest.TempPathFactory, work: Callable[..., ByName], world_size: int, *args: Any
) -> list[ByName]:
    """Trainings of each rank, which the workers of a run of pytest share."""

    def make(folder: Path) -> None:
        (folder / "trained").write_bytes(pickle.dumps(spawn(work, world_size, *args)))

    name = "-".join(map(str, ("stand-in", work.__name__, *args)))
    of_ranks: list[ByName] = pickle.loads((made_once(factory, name, make) / "trained").read_bytes())
    return of_ranks


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Trained, Trained]]:
    """A run's training; its part is trained when the first of its runs is asked for."""

    @cache
    def of_part(part: int) -> ByName:
        return trained_once(tmp_path_factory, train_on_both, 1, part)[0]

    return lambda run: of_part(part_of(run))[run]


def assert_close(on_device: Trained, on_cpu: Trained) -> None:
    """In bf16, documents and experts have other kernels on the CPU."""
    is_rounded = on_device.costs.asked & {"has_varlen", "has_grouped_product"}
    assert on_device.numbers == pytest.approx(on_cpu.numbers, rel=2e-2 if is_rounded else 1e-6)


each_run = pytest.mark.parametrize("run", RUNS, scope="module")
"""Tests of the same run come together, so that one worker has them."""


@each_run
def test_numbers_are_those_of_the_cpu(trained: Any, run: str) -> None:
    on_cpu, on_device = trained(run)
    assert sum(on_device.costs.launches.values()) > 100
    assert not on_cpu.costs.launches
    assert_close(on_device, on_cpu)


@each_run
def test_the_host_waits_once_a_step_and_for_rows_of_experts(trained: Any, run: str) -> None:
    """For experts, it waits in each layer without a kernel, or with a capacity."""
    costs = trained(run)[1].costs
    assert len(costs.waits) == 1 + waits_of_experts(one_rank(run)), costs.waits
    assert costs.copies["back"] <= len(costs.waits)
    assert not costs.copies["unpinned"]


@each_run
def test_a_step_computes_nothing_on_the_host(trained: Any, run: str) -> None:
    assert not trained(run)[1].costs.of_host


@each_run
def test_a_step_leaves_nothing_on_the_device(trained: Any, run: str) -> None:
    before, after = trained(run)[1].live
    assert before == after > 0


# ---- Extra passes of an optimizer ----


@pytest.fixture(scope="module")
def passes(tmp_path_factory: pytest.TempPathFactory) -> ByName:
    return trained_once(tmp_path_factory, train_with_passes, 1)[0]


@pytest.mark.parametrize("run", PASSES)
def test_an_extra_pass_waits_once(passes: Any, run: str) -> None:
    """For whether its gradients are finite."""
    on_cpu, on_device = passes[run]
    assert_close(on_device, on_cpu)
    assert len(on_device.costs.waits) == 2, on_device.costs.waits
    assert not on_device.costs.copies["unpinned"]
    assert not on_device.costs.of_host


# ---- Several ranks, and DeepSpeed ----


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> list[ByName]:
    return trained_once(tmp_path_factory, train_layouts, 2)


@pytest.mark.ranks
@pytest.mark.parametrize("name", LAYOUTS)
def test_each_rank_waits_once_a_step_and_for_rows_of_experts(layouts: Any, name: str) -> None:
    for rank in layouts:
        on_cpu, on_device = rank[name]
        assert_close(on_device, on_cpu)
        costs = on_device.costs
        assert len(costs.waits) == 1 + waits_of_experts(layout(name)), costs.waits
        assert not costs.copies["unpinned"]
        assert not costs.of_host


WAITS_OF_DEEPSPEED = {0: 1, 1: 7, 2: 7, 3: 5}
"""Waits of a step by ZeRO stage: one in tokamake, the others in DeepSpeed's step and norm."""


def test_waits_of_deepspeed() -> None:
    """Only waits: `test_trainer_standin_stages.py` compares numbers with a CPU."""
    (trained,) = spawn(train_by_deepspeed, 1, [*WAITS_OF_DEEPSPEED])
    for (stage, expected), on_device in zip(WAITS_OF_DEEPSPEED.items(), trained, strict=True):
        waits = on_device.costs.waits
        assert len(waits) == expected, (stage, waits)
        assert sum("backends/deepspeed.py" not in each for each in waits) == 1, (stage, waits)
        assert not on_device.costs.of_host, stage


# ---- Branches by type of device: the table of the library, and the entry of the stand-in ----

UNREACHED = {
    "backend": "nccl and xccl: gloo exchanges tensors of the stand-in",
    "allows_attention": "fused kernels of ring attention: plain arithmetic on the stand-in",
    "compiles": "compiled losses and updates, and layers: the stand-in has no compiler",
}
"""Entries of the table whose branches the stand-in does not take, and why; only tests of the marker
`gpu` reach them."""
PLAYED = {
    "memory_bytes": "a number",
    "identity": "a text",
    "has_varlen": "flash attention of documents is a mask",
}
"""Entries that the stand-in has of its own: tokamake takes the branch of an accelerator."""


def test_entries_of_the_table_that_the_stand_in_cannot_reach_are_listed() -> None:
    cpu, own = DEVICE_TYPES["cpu"], standin_use.DEVICE_TYPE
    kinds = [each for name, each in DEVICE_TYPES.items() if name != "cpu"]
    found: dict[str, set[str]] = {"unreached": set(), "played": set()}
    for name in own._fields:
        ours, default = getattr(own, name), getattr(cpu, name)
        if {getattr(each, name) for each in kinds} - {ours, default}:
            found["unreached" if ours == default else "played"].add(name)
    assert found == {"unreached": {*UNREACHED}, "played": {*PLAYED}}


def test_steps_ask_the_table(trained: Any) -> None:
    asked = set[str]().union(*(each.costs.asked for _, each in map(trained, RUNS)))
    assert asked == {"has_varlen", "has_grouped_product", "allows_attention"}


def test_only_the_table_has_branches_by_type_of_accelerator() -> None:
    """A type, or torch's module for it: as a text, or as an attribute of torch or its backends.

    Nor can the stand-in reach streams and autocast: its streams order nothing, and it casts nothing
    by itself.
    """
    named, names = set(), set[str]()
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Constant(value="cuda" | "xpu") | ast.Attribute(attr="cuda" | "xpu"):
                    named.add(str(path.relative_to(PACKAGE)))
                case ast.Attribute(attr=name) | ast.alias(name=name):
                    names.add(name)
    assert named == {"runtime/device_types.py"}
    assert not names & {"autocast", "Stream", "current_stream", "record_stream", "wait_stream"}


# ---- The stand-in itself ----


def refusals_and_costs() -> None:
    device = standin_device.install()
    ones = torch.ones(4, 4, device=device)
    with pytest.raises(RuntimeError, match="same device, but found standin:0 and cpu"):
        ones + torch.ones(4, 4)
    with pytest.raises(RuntimeError, match="same device"):
        torch.cat((ones[0], torch.ones(4)))
    assert (ones + torch.tensor(2.0)).sum().item() == 48  # CUDA takes scalars of the host
    for waiting in (
        lambda: ones.sum().item(),
        lambda: ones.tolist(),
        lambda: ones.cpu(),
        lambda: bool(ones.any()),
        lambda: ones.nonzero(),
        lambda: ones[ones > 0],
        lambda: torch.tensor([1.0], device=device),
        lambda: torch.ones(3).to(device),
        lambda: torch.equal(ones, ones),
    ):
        with counted() as costs:
            waiting()
        assert len(costs.waits) == 1, costs
        assert "test_trainer_standin" in costs.waits[0]
    with counted() as costs:
        ones.t() @ ones[:2].mT  # views cost nothing
        ones[ones > 2] = 0.0
        torch.ones(3).pin_memory().to(device, non_blocking=True)
        torch.ones(3).to(device, non_blocking=True)
    assert not costs.waits
    assert costs.launches == {"mm": 1, "gt": 1, "fill_": 1, "_index_put_impl_": 1}
    assert costs.copies == {"pinned": 1, "unpinned": 1}
    assert [each.partition(" ")[0] for each in costs.of_host] == ["ones", "ones"]


def random_numbers() -> None:
    """Code that seeds, saves or restores the CPU's generator alone changes nothing here."""
    device = standin_use.use()

    def drawn() -> list[float]:
        numbers = [*torch.rand(2, device=device), torch.zeros((), device=device).normal_()]
        return [each.item() for each in numbers]

    seed_all(7)
    of_host = torch.get_rng_state()
    first = drawn()
    assert torch.equal(torch.get_rng_state(), of_host)
    state = random_state()
    second = drawn()
    assert second != first
    torch.set_rng_state(of_host)
    assert drawn() not in (first, second)
    set_random_state(state)
    assert drawn() == second
    seed_all(7)
    assert drawn() == first
    with pytest.raises(RuntimeError, match="Expected a 'standin' device type for generator"):
        torch.rand(2, device=device, generator=torch.Generator())


def continued(folder: Path) -> None:
    """A checkpoint has the state of the device's generator."""
    device = standin_use.use()
    engine = engine_of(one_rank("llama causal, bf16"), device)
    torch.rand(3, device=device)
    engine.save(folder, {"iteration": 1, "consumed_samples": 8, "consumed_tokens": 64}).wait()
    drawn = torch.rand(3, device=device).tolist()
    assert torch.rand(3, device=device).tolist() != drawn
    engine.load(folder)
    assert torch.rand(3, device=device).tolist() == drawn


def facts() -> None:
    device = standin_use.use()
    assert device_memory(device, Ranks(0, 1, 0, 1)) == 2**34
    assert DEVICE_TYPES[device.type].identity(device).startswith("standin of process ")


def test_the_stand_in_refuses_and_counts_as_cuda_does() -> None:
    spawn(refusals_and_costs, 1)


def test_the_stand_in_has_a_random_generator_of_its_own() -> None:
    spawn(random_numbers, 1)


def test_a_checkpoint_has_the_random_state_of_the_device(tmp_path: Path) -> None:
    spawn(continued, 1, tmp_path / "saved")
