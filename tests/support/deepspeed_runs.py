"""Settings of DeepSpeed, and checkpoints that move between it and others, for tests."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.engines import Part, buffer, build, coming, parts, pieces
from tests.support.layouts import Found, laid_out, rates
from tokamake.config.resolved_run import read_run
from tokamake.data.samples.loader import Step

BF16 = {"precision": "bf16"}


def zero(stage: int, **more: Any) -> dict[str, Any]:
    """Changes of the section `train`: ZeRO's stage, and others."""
    return {"backend": "deepspeed", "zero_stage": stage, **more}


class Move(NamedTuple):
    """A checkpoint saved by one layout, loaded by another; or one of these."""

    config: Path
    """The run.yaml."""
    folder: Path
    """Of the checkpoint."""
    save: dict[str, Any] | None = None
    """Settings of the section `train` that differ from the config's where it is saved."""
    load: dict[str, Any] | None = None
    """The same where it is loaded."""


def move_all(moves: list[Move]) -> list[Found]:
    """Do moves one after the other; all ranks call this, each gets its part."""
    return [_save(move) | _load(move) for move in moves]


def _save(move: Move) -> Found:
    if move.save is None:
        return {}
    run = laid_out(read_run(move.config), move.save)
    engine = build(run)
    some = coming(engine, run)
    for number in range(3):
        engine.train_step(next(some).micro_batches, **rates(number))
    progress = {"iteration": 3, "consumed_samples": 24, "consumed_tokens": 24 * 16}
    saving = engine.save(move.folder, progress)
    found: Found = {"saved": states(engine)}
    found["losses after saving"] = _go_on(engine, some)
    found["end after saving"] = states(engine)
    saving.wait()
    return found


def _load(move: Move) -> Found:
    if move.load is None:
        return {}
    run = laid_out(read_run(move.config), move.load)
    engine = build(run)
    engine.load(move.folder)
    found: Found = {"loaded": states(engine)}
    found["losses after loading"] = _go_on(engine, coming(engine, run, done=3))
    found["end after loading"] = states(engine)
    return found


def _go_on(engine: Any, some: Iterator[Step]) -> list[float]:
    return [
        engine.train_step(next(some).micro_batches, **rates(number)).loss for number in range(3, 6)
    ]


def states(engine: Any) -> list[Part]:
    """Weights and optimizer states of this rank; what is not cut as they are has all places."""
    found: list[Part] = []
    for one in pieces(engine):
        flat, held = buffer(one), getattr(one, "held", one)
        state = engine._optimizer.state.get(flat, {})
        for kind, value in {"model": flat, **state}.items():
            if value.shape == flat.shape:
                found += parts(one, value, f"{kind}.")
            else:
                found.append((f"{kind}.{held.saved_name}", value.shape, ..., value.clone()))
    return found
