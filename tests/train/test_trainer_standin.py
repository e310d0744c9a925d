"""Training on an accelerator, which a stand-in plays: every objective has the numbers of the CPU.

The stand-in counts what a step costs. It joins no objective by name: whatever makes random samples
is trained here.
"""

import re
from typing import Any

import pytest
import torch

from tests.support import standin_device
from tests.support.paths import MODULES, PACKAGE
from tests.support.ranks import spawn
from tests.support.standin_costs import counted
from tests.support.standin_training import (
    PASSES,
    RUNS,
    Trained,
    train_on_both,
    train_with_passes,
)


@pytest.fixture(scope="module")
def trained() -> dict[str, tuple[Trained, Trained]]:
    of_rank: dict[str, tuple[Trained, Trained]]
    (of_rank,) = spawn(train_on_both, 1)
    return of_rank


@pytest.mark.parametrize("run", RUNS)
def test_numbers_are_those_of_the_cpu(trained: Any, run: str) -> None:
    on_cpu, on_device = trained[run]
    assert sum(on_device.costs.launches.values()) > 100
    assert not on_cpu.costs.launches
    assert on_device.numbers == pytest.approx(on_cpu.numbers, rel=1e-6)


@pytest.mark.parametrize("run", RUNS)
def test_the_host_waits_once_a_step(trained: Any, run: str) -> None:
    costs = trained[run][1].costs
    assert len(costs.waits) == 1, costs.waits
    assert costs.copies["back"] == 1
    assert not costs.copies["unpinned"]


@pytest.mark.parametrize("run", RUNS)
def test_a_step_computes_nothing_on_the_host(trained: Any, run: str) -> None:
    assert not trained[run][1].costs.of_host


@pytest.mark.parametrize("run", RUNS)
def test_a_step_leaves_nothing_on_the_device(trained: Any, run: str) -> None:
    before, after = trained[run][1].live
    assert before == after > 0


# ---- Kernels of CUDA, which a mask plays; extra passes of an optimizer ----


@pytest.fixture(scope="module")
def passes() -> dict[str, tuple[Trained, Trained]]:
    of_rank: dict[str, tuple[Trained, Trained]]
    (of_rank,) = spawn(train_with_passes, 1)
    return of_rank


@pytest.mark.parametrize("run", PASSES)
def test_bounds_of_documents_and_draws_of_labels_wait_for_nothing(passes: Any, run: str) -> None:
    """An extra pass waits once more, for whether its gradients are finite."""
    on_cpu, on_device = passes[run]
    assert on_device.numbers == pytest.approx(on_cpu.numbers, rel=2e-2 if "flash" in run else 1e-6)
    assert len(on_device.costs.waits) == (1 if "flash" in run else 2), on_device.costs.waits
    assert not on_device.costs.copies["unpinned"]
    assert "flash" not in run or on_device.costs.launches["searchsorted"] == 4


# ---- Branches that it cannot reach ----

UNREACHED = {
    "estimate/layouts.py": "estimates for GPUs",
    "estimate/run.py": "estimates for GPUs",
    "optim/adamw_8bit.py": "compiled updates: the stand-in has no compiler",
    "parallel/attention.py": "the kernel of flash attention for documents; a mask plays it above",
    "parallel/grouped_linear.py": "the kernel of products of groups; masks play it above",
    "parallel/loss.py": "the compiled loss",
    "parallel/ring_kernels.py": "fused kernels of ring attention",
    "runtime/device.py": "back ends of torch.distributed, and the memory of a device",
    "runtime/process_group.py": "UUIDs of devices",
    "train/backends/_base.py": "samples of text of a compiled model",
    "train/memory.py": "estimates of flash attention",
    "train/pipeline_stages.py": "compiled layers",
}
"""Modules that name a type of accelerator or compile, and why; only tests of the marker `gpu` reach
these branches on a device."""
NAMED = re.compile(
    r'"(cuda|xpu)"|torch\.(cuda|xpu)\b|backends\.cuda|(torch|layer)\.compile\(|set_stance'
)


def test_branches_that_the_stand_in_cannot_reach_are_listed() -> None:
    found = {str(each.relative_to(PACKAGE)) for each in MODULES if NAMED.search(each.read_text())}
    assert found == {*UNREACHED}


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


def test_the_stand_in_refuses_and_counts_as_cuda_does() -> None:
    spawn(refusals_and_costs, 1)
