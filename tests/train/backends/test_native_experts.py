"""Experts that ranks divide: a training moves from layout to layout, bit for bit."""

from collections.abc import Hashable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import hf_folder
from tests.support.composition_axes import Values
from tests.support.compositions import Composition
from tests.support.engines import NamedChunk, build, parts, whole
from tests.support.grids import cover
from tests.support.proved_compositions import assert_proved
from tests.support.ranks import spawn
from tokamake.checkpoint import writer
from tokamake.checkpoint.detect import open_any
from tokamake.checkpoint.tensors.checkpoint import Target
from tokamake.config.resolved_run import Run
from tokamake.prove.engine_tensors import fragments
from tokamake.prove.plain_training import rates, train_plainly
from tokamake.prove.random_samples import rank_ids, rank_samples, step_samples

SIZES = ("expert", "tensor", "context", "pipeline")
COUNTS = {"architecture.num_experts": 4, "optimizer.name": "adamw"}


def run_of(data: int, zero: int, **sizes: int) -> Run:
    """A run on four ranks with 8 samples a step; `sizes` are of `SIZES`."""
    values: Values = {f"parallel.{name}_parallel_size": size for name, size in sizes.items()}
    values |= COUNTS | {"data_parallel_size": data, "zero_stage": zero}
    values["num_micro_batches"] = 4 // data
    return Composition("mixtral", "causal", values, 3).run()


RUNS = [
    run_of(4, 1, expert=2),
    run_of(4, 3, expert=4),
    run_of(4, 2),
    run_of(2, 0, expert=2, tensor=2),
    run_of(2, 2, expert=4, context=2),
    run_of(2, 1, expert=2, pipeline=2),
    run_of(4, 0, expert=2),
]
"""Layouts of a training, one after the other."""


def move(folder: Path) -> list[tuple[list[NamedChunk], list[NamedChunk], float, float]]:
    """Make a step in each layout. Returns what each has loaded and saved, losses and norms."""
    results: list[Any] = []
    for number, run in enumerate(RUNS):
        engine = build(run, continues=number > 0)
        if number:
            engine.load(folder / str(number - 1))
        loaded = state(engine)
        objective = engine.stages.objective
        rows = rank_samples(step_samples(objective, step=number), engine.mesh)
        ids = rank_ids(objective, engine.mesh, step=number)
        done = engine.train_step(rows, samples=ids, **rates(run, number))
        progress = {"iteration": number, "consumed_samples": 0, "consumed_tokens": 0}
        engine.save(folder / str(number), progress).wait()
        results.append((loaded, state(engine), done.loss, done.grad_norm))
    return results


def state(engine: Any) -> list[NamedChunk]:
    """Weights and moments of this rank."""
    found: list[NamedChunk] = []
    for each in fragments(engine):
        found += parts(each, each.local)
        for kind in ("exp_avg", "exp_avg_sq"):
            if kind in engine.optimizer.state[each.local]:
                found += parts(each, engine.optimizer.state[each.local][kind], f"{kind} ")
    return found


@pytest.mark.ranks
def test_a_training_moves_between_numbers_of_ranks_that_divide_experts(tmp_path: Path) -> None:
    of_ranks = spawn(move, 4, tmp_path)
    plain = train_plainly(RUNS[0], num_steps=len(RUNS)).steps
    saved: dict[str, torch.Tensor] = {}
    for number, (run, step) in enumerate(zip(RUNS, plain, strict=True)):
        where = str(run.train.parallel)
        loaded = whole(of_rank[number][0] for of_rank in of_ranks)
        for name, tensor in saved.items():
            assert torch.equal(loaded[name], tensor), (name, where)
        saved = whole(of_rank[number][1] for of_rank in of_ranks)
        for of_rank in of_ranks:
            assert of_rank[number][2] == pytest.approx(step.loss, rel=1e-4), where
            assert of_rank[number][3] == pytest.approx(step.grad_norm, rel=1e-3), where
    assert len(saved) == 3 * len(plain[-1].weights)
    # Four ranks divided experts; the next layout, without such ranks, has loaded the same.
    loaded = whole(of_rank[2][0] for of_rank in of_ranks)
    writer.write(tmp_path / "hf", open_any(tmp_path / "1"), "hf", Target())
    _, exported = hf_folder.read(tmp_path / "hf")
    assert len(exported) == len(plain[-1].weights)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in exported.items())


@pytest.mark.ranks
def test_ranks_that_share_rows_and_experts_drop_as_one_process() -> None:
    values: Values = COUNTS | {
        "parallel.context_parallel_size": 2,
        "parallel.expert_parallel_size": 4,
        "data_parallel_size": 2,
        "router.capacity_factor": 0.5,
    }
    assert_proved([Composition("mixtral", "causal", values, 3)])


@pytest.mark.ranks
def test_ranks_that_do_not_divide_the_number_of_experts_have_equal_parts() -> None:
    shape = {"architecture.num_experts": 3, "data_parallel_size": 2, "zero_stage": 1}
    of_ranks = spawn(stack_sizes, 2, Composition("mixtral", "causal", shape, 3).run())
    assert of_ranks[0] == of_ranks[1]
    assert len(of_ranks[0]) == 6
    for own, whole_size in of_ranks[0].values():
        assert own == whole_size / 2


def stack_sizes(run: Run) -> dict[str, tuple[int, int]]:
    """Elements of each stack of experts on this rank, and of the whole stack."""
    return {
        chunk.name: (chunk.local.numel(), chunk.shape.numel())
        for chunk in build(run)._chunks
        if len(chunk.shape) == 3
    }


def grid() -> list[Composition]:
    """Ranks that divide experts, with each other kind of parallelism and each ZeRO stage."""
    found = []
    for expert in (1, 2, 4):
        for zero in range(4):
            for name, size in (("tensor", 2), ("pipeline", 2), ("context", 2), ("tensor", 1)):
                for data in (1, 2, 4):
                    values: Values = COUNTS | {
                        "parallel.expert_parallel_size": expert,
                        f"parallel.{name}_parallel_size": size,
                        "data_parallel_size": data,
                        "zero_stage": zero,
                    }
                    family = ("mixtral", "qwen3_moe", "olmoe")[len(found) % 3]
                    drawn = Composition(family, "causal", values, len(found))
                    if not drawn.refusal:
                        found.append(drawn)
    # Groups of ranks that each keep a copy.
    groups = {"parallel.data_parallel_replicate_size": 2, "data_parallel_size": 4, "zero_stage": 2}
    more = {"parallel.expert_parallel_size": 2, **COUNTS, **groups}
    return [*found, Composition("mixtral", "causal", more, 5)]


@pytest.mark.ranks
@pytest.mark.grid
def test_layouts_of_experts_train_as_one_process() -> None:
    """Layouts that have each pair of values; random compositions draw others."""
    compositions = cover(grid(), pairs_of_values)
    assert 10 < len(compositions) < 50
    assert_proved(compositions)


def pairs_of_values(composition: Composition) -> set[Hashable]:
    return {
        *combinations(sorted((name, str(value)) for name, value in composition.values.items()), 2)
    }


@pytest.mark.ranks
@pytest.mark.grid
def test_experts_are_gathered_before_a_layer_is_computed_again() -> None:
    """Two micro batches share what ZeRO 3 gathers, and dropout asks first for saved states."""
    values = COUNTS | {
        "parallel.expert_parallel_size": 2,
        "parallel.pipeline_parallel_size": 2,
        "data_parallel_size": 4,
        "zero_stage": 3,
        "recompute_granularity": "selective",
        "dropout.hidden": 0.1,
        "num_micro_batches": 2,
        "parallel.pipeline_schedule": "interleaved_1f1b",
        "parallel.virtual_pipeline_size": 2,
    }
    assert_proved([Composition("mixtral", "causal", values, 7)])


@pytest.mark.ranks
def test_ranks_compute_experts_again_together_in_zero_bubble_pipelines() -> None:
    """Experts of some ranks have no tokens in a micro batch, and so no gradients of weights."""
    values = {
        "parallel.expert_parallel_size": 4,
        "data_parallel_size": 4,
        "architecture.num_experts": 4,
        "parallel.pipeline_parallel_size": 2,
        "parallel.pipeline_schedule": "interleaved_zero_bubble",
        "parallel.virtual_pipeline_size": 2,
        "recompute_granularity": "full",
        "num_micro_batches": 4,
        "micro_batch_size": 1,
    }
    assert_proved([Composition("gpt_oss", "causal", values, 1)])
