"""Runs with DeepSpeed, and checkpoints that one parallel layout saves and another loads."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.engines import NamedChunk, build, coming, parts
from tests.support.layouts import RankResults, laid_out, rates
from tokamake.config.resolved_run import read_run
from tokamake.data.samples.steps import StepBatch
from tokamake.prove.engine_tensors import buffer, fragments

BF16 = {"precision": "bf16"}


def zero(stage: int, **settings: Any) -> dict[str, Any]:
    """Return settings of the section `train` for DeepSpeed with a ZeRO stage."""
    return {"backend": "deepspeed", "zero_stage": stage, **settings}


class Move(NamedTuple):
    """A checkpoint that one layout saves, another loads, or both."""

    config: Path
    """The run.yaml."""
    folder: Path
    """Folder of the checkpoint."""
    save: dict[str, Any] | None = None
    """Changed settings of the section `train` for saving, or None to save nothing."""
    load: dict[str, Any] | None = None
    """Changed settings for loading, or None to load nothing."""


def move_all(moves: list[Move]) -> list[RankResults]:
    """Save and load checkpoints. All ranks call this; each returns its own results."""
    return [_save(move) | _load(move) for move in moves]


def _save(move: Move) -> RankResults:
    if move.save is None:
        return {}
    run = laid_out(read_run(move.config), move.save)
    engine = build(run)
    steps = coming(engine, run)
    for number in range(3):
        engine.train_step(next(steps).micro_batches, **rates(number))
    progress = {"iteration": 3, "consumed_samples": 24, "consumed_tokens": 24 * 16}
    saving = engine.save(move.folder, progress)
    results: RankResults = {"saved": states(engine)}
    results["losses after saving"] = _train_on(engine, steps)
    results["end after saving"] = states(engine)
    saving.wait()
    return results


def _load(move: Move) -> RankResults:
    if move.load is None:
        return {}
    run = laid_out(read_run(move.config), move.load)
    engine = build(run)
    engine.load(move.folder)
    results: RankResults = {"loaded": states(engine)}
    results["losses after loading"] = _train_on(engine, coming(engine, run, done=3))
    results["end after loading"] = states(engine)
    return results


def _train_on(engine: Any, steps: Iterator[StepBatch]) -> list[float]:
    return [
        engine.train_step(next(steps).micro_batches, **rates(number)).loss for number in range(3, 6)
    ]


def states(engine: Any) -> list[NamedChunk]:
    """Return the weights and optimizer states of this rank."""
    states: list[NamedChunk] = []
    for fragment in fragments(engine):
        flat, chunk = buffer(fragment), getattr(fragment, "chunk", fragment)
        state = engine.optimizer.state.get(flat, {})
        for kind, value in {"model": flat, **state}.items():
            if value.shape == flat.shape:
                states += parts(fragment, value, f"{kind}.")
            else:  # a step count, which is not partitioned
                states.append((f"{kind}.{chunk.saved_name}", value.shape, ..., value.clone()))
    return states
