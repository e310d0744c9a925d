"""Training on an accelerator, which a stand-in plays: every objective has the numbers of the CPU.

The stand-in counts what a step costs. It joins no objective by name: whatever makes random samples
is trained here.
"""

from typing import Any, NamedTuple

import pytest
import torch

from tests.support import standin_device
from tests.support.compositions import Composition, axes, learners
from tests.support.ranks import spawn
from tests.support.standin_costs import Costs, counted, live_bytes
from tokamake import plugins
from tokamake.config.resolved_run import Run
from tokamake.prove.plain_training import rates
from tokamake.prove.random_samples import rank_ids, rank_samples, step_samples
from tokamake.runtime.device import BACKENDS
from tokamake.runtime.ranks import Ranks
from tokamake.train.numerics import with_precision

CPU = torch.device("cpu")
NUM_STEPS = 4
CHANGES: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16"},
    "recomputation": {"recompute_granularity": "full"},
    "document masks": {"reset_attention_mask": True, "reset_position_ids": True},
    "norms of layers": {"log_layer_norms": True},
    "losses of corpora": {"log_corpus_losses": True},
    "dropout": {"dropout.hidden": 0.1, "dropout.attention": 0.1},
    **{name: {"optimizer.name": name} for name in axes()["optimizer.name"]},
}
"""Changes of a causal run whose code differs on a device."""
RUNS = {
    **{f"{family} {objective}": (family, objective, {}) for family, objective in learners()},
    **{f"llama causal, {change}": ("llama", "causal", of) for change, of in CHANGES.items()},
    "bert masked, packed": ("bert", "masked", {"pack_samples": True}),
}
"""Each family with each objective that it learns, and variants."""


class Trained(NamedTuple):
    """Some steps of training."""

    numbers: list[float]
    """Losses and norms of gradients, and losses of validations before and after."""
    costs: Costs
    """Of the last step."""
    live: tuple[int, int]
    """Bytes on the device after the last but one step, and after the last one."""


def train(run: Run, device: torch.device) -> Trained:
    engine = plugins.load("train/backends", run.train.backend).Engine(
        with_precision(run, device), Ranks(0, 1, 0, 1), device=device
    )
    objective, mesh = engine.stages.objective, engine.mesh

    def validate() -> float:
        rows = rank_samples(step_samples(objective, step=NUM_STEPS), mesh)
        return float(engine.validate(iter(rows)).loss)

    numbers, bytes_after = [validate()], [0]
    for step in range(NUM_STEPS):
        rows = rank_samples(step_samples(objective, step=step), mesh)
        ids = rank_ids(run, mesh, step=step)
        with counted() as costs:
            done = engine.train_step(rows, samples=ids, **rates(run, step))
        numbers += [done.loss, done.grad_norm]
        bytes_after.append(live_bytes())
    numbers.append(validate())
    return Trained(numbers, costs, (bytes_after[-2], bytes_after[-1]))


def train_on_both() -> dict[str, tuple[Trained, Trained]]:
    """Train each run on the CPU and on the stand-in."""
    device = standin_device.install()
    BACKENDS[device.type] = "gloo"
    trained = {}
    for name, (family, objective, values) in RUNS.items():
        run = Composition(1, family, objective, values, seed=5).run()
        trained[name] = (train(run, CPU), train(run, device))
    return trained


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
