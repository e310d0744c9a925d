"""Engines without a trainer, on the ranks that tests spawn: build, step, compare."""

import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from tokamake import plugins
from tokamake.config.resolved_run import Run
from tokamake.data.samples.document_samples import DocumentSamples
from tokamake.data.samples.steps import StepBatch, steps
from tokamake.parallel.sharding import ParameterChunk
from tokamake.runtime.ranks import Ranks
from tokamake.train.numerics import with_precision

RATES = {"learning_rate": 0.01, "weight_decay": 0.1}

NamedChunk = tuple[str, torch.Size, Any, torch.Tensor]
"""Name and shape of a whole tensor, the place of a chunk in it, and the chunk."""


def build(run: Run, **options: Any) -> Any:
    """Engine of a run's back end on this rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ["LOCAL_RANK"] = str(rank)  # `runtime.process_group` sets it, too
    engine = plugins.load("train/backends", run.train.backend).Engine
    device = torch.device("cpu")
    return engine(
        with_precision(run, device), Ranks(rank, size, rank, size), device=device, **options
    )


def coming(engine: Any, run: Run, *, done: int = 0) -> Iterator[StepBatch]:
    """Steps of this rank after `done` steps of full size."""
    return steps(
        DocumentSamples(run.index, split="train", data_root=run.data_root),
        run.train.batch_sizes,
        consumed_samples=done * run.train.global_batch_size,
        micro_batch_size=run.train.micro_batch_size,
        data_parallel_rank=engine.mesh.data.rank,
        data_parallel_size=engine.mesh.data.size,
    )


def go(engine: Any, steps_left: Iterable[StepBatch], number: int, **rates: float) -> list[float]:
    """Train on `number` steps; return their losses."""
    steps = zip(range(number), steps_left, strict=False)
    results = [engine.train_step(step.micro_batches, **{**RATES, **rates}) for _, step in steps]
    assert len(results) == number
    return [result.loss for result in results]


def parts(fragment: Any, tensor: torch.Tensor, kind: str = "") -> Iterator[NamedChunk]:
    """Copies of the chunks of whole tensors in a tensor of the shape of a fragment's buffer."""
    if isinstance(fragment, ParameterChunk):
        yield kind + fragment.saved_name, fragment.shape, fragment.place, tensor.detach().clone()
        return
    chunk = fragment.chunk
    for offset, elements in fragment.place(tensor).chunks.items():
        sizes = zip(offset, elements.shape, strict=True)
        place = tuple(slice(start, start + size) for start, size in sizes)
        yield kind + chunk.saved_name, chunk.shape, place, elements.clone()


def whole(of_ranks: Iterable[Iterable[NamedChunk]]) -> dict[str, torch.Tensor]:
    """Join the chunks of all ranks; where ranks have the same elements, these must be equal."""
    result: dict[str, torch.Tensor] = {}
    for name, shape, place, part in (part for of_rank in of_ranks for part in of_rank):
        empty = torch.full(shape, torch.nan, dtype=part.dtype)
        earlier = result.setdefault(name, empty)[place]
        assert torch.equal(earlier.where(~earlier.isnan(), part), part), f"{name}: ranks differ"
        result[name][place] = part
    missing = [name for name, tensor in result.items() if tensor.isnan().any()]
    assert not missing, f"no rank has all of {missing}"
    return result


def weights(engine: Any) -> dict[str, torch.Tensor]:
    """Copies of this rank's weights, of the native back end."""
    return {chunk.saved_name: chunk.local.detach().clone() for chunk in engine._chunks}


def states(engine: Any) -> dict[str, Any]:
    """Copies of this rank's optimizer states, of the native back end."""
    return {
        f"{chunk.saved_name} {kind}": value.clone()
        for chunk in engine._chunks
        for kind, value in engine.optimizer.state.get(chunk.local, {}).items()
    }


def assert_equal(
    actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], where: Any = ""
) -> None:
    """Check that two sets of tensors have the same bits."""
    assert actual.keys() == expected.keys(), where
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), (name, where)
