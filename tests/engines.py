"""The native engine by itself, on the ranks that tests spawn: built, fed, stepped."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from tokamake.config import Run
from tokamake.data.samples.loader import Samples, Step, steps
from tokamake.runtime import Ranks
from tokamake.train.backends.native import Engine

RATES = {"learning_rate": 0.01, "weight_decay": 0.1}


def build(run: Run) -> Engine:
    """The engine of this rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    return Engine(run, Ranks(rank, size, rank, size), torch.device("cpu"))


def coming(engine: Engine, run: Run, *, done: int = 0) -> Iterator[Step]:
    """Steps of this rank after so many of full size."""
    return steps(
        Samples(run.index, split="train", data_root=run.data_root),
        run.train.batch_sizes,
        consumed_samples=done * run.train.global_batch_size,
        micro_batch_size=run.train.micro_batch_size,
        data_parallel_rank=engine.mesh.data.rank,
        data_parallel_size=engine.mesh.data.size,
    )


def go(engine: Engine, some: Iterable[Step], number: int, **rates: float) -> list[float]:
    """Do so many steps; their losses."""
    pairs = zip(range(number), some, strict=False)
    found = [engine.train_step(step.micro_batches, **{**RATES, **rates}) for _, step in pairs]
    assert len(found) == number
    return [result.loss for result in found]


def weights(engine: Engine) -> dict[str, torch.Tensor]:
    """Copies of this rank's parts."""
    return {held.saved_name: held.local.detach().clone() for held in engine._held}


def states(engine: Engine) -> dict[str, Any]:
    """Copies of this rank's parts of what the optimizer keeps."""
    return {
        f"{held.saved_name} {kind}": value.clone()
        for held in engine._held
        for kind, value in engine._optimizer.state.get(held.local, {}).items()
    }


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """They hold the same bits."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
