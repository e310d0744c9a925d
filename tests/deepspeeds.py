"""Training steps of the DeepSpeed back end at any layout, gathered whole, for its proofs."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from layouts import NUM_STEPS, Found, Layout, laid_out, rates

from tokamake.config import Run, read_run
from tokamake.data.samples.loader import Samples, Step, steps
from tokamake.runtime import Ranks
from tokamake.train.backends import deepspeed, native

BACKENDS: Any = {"deepspeed": deepspeed.Engine, "native": native.Engine}


def build(run: Run) -> Any:
    """The engine of a run's back end, of this rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ["LOCAL_RANK"] = str(rank)  # as `runtime.process_group` does
    return BACKENDS[run.train.backend](run, Ranks(rank, size, rank, size), torch.device("cpu"))


def batches(engine: Any, run: Run, *, done: int = 0) -> Iterator[Step]:
    """Steps of this rank after so many of full size."""
    return steps(
        Samples(run.index, split="train", data_root=run.data_root),
        run.train.batch_sizes,
        consumed_samples=done * run.train.global_batch_size,
        micro_batch_size=run.train.micro_batch_size,
        data_parallel_rank=engine.mesh.data.rank,
        data_parallel_size=engine.mesh.data.size,
    )


def train_all(layouts: list[Layout]) -> list[Found]:
    """Train once for each layout; all ranks call this, each gets its part."""
    return [train(laid_out(read_run(config), changes)) for config, changes in layouts]


def train(run: Run) -> Found:
    """Do steps and say what came of them."""
    engine = build(run)
    found: Found = {"losses": [], "norms": [], "gradients": []}
    if hasattr(engine, "_pieces"):
        watch(engine, found["gradients"])
    coming = batches(engine, run)
    found["validation"] = engine.mean_loss(iter(next(coming).micro_batches))
    for number in range(NUM_STEPS):
        result = engine.train_step(next(coming).micro_batches, **rates(number))
        found["losses"].append(result.loss)
        found["norms"].append(result.grad_norm)
    found["after"] = engine.mean_loss(iter(next(coming).micro_batches))
    pieces = getattr(engine, "_pieces", ())
    found["weights"] = [part for piece in pieces for part in parts(piece, piece.flat)]
    return found


def parts(piece: Any, tensor: torch.Tensor) -> Iterator[tuple[str, Any, torch.Tensor]]:
    """Name, place and copy of each box of a piece of a flat buffer."""
    for offset, box in piece.place(tensor).boxes.items():
        sizes = zip(offset, box.shape, strict=True)
        place = tuple(slice(start, start + size) for start, size in sizes)
        yield piece.held.saved_name, place, box.clone()


def watch(engine: Any, into: list[Any]) -> None:
    """Keep the gradients of the first update, clipped, before the optimizer has them."""
    update, wanted = engine._optimizer.step, list(engine._pieces)

    def step(*arguments: Any) -> Any:
        # DeepSpeed updates groups of parameters one after the other, clipping each just before.
        now = {id(each) for group in engine._optimizer.param_groups for each in group["params"]}
        for piece in [*wanted]:
            if id(piece.flat) in now:
                into.extend(parts(piece, piece.flat.grad))
                wanted.remove(piece)
        return update(*arguments)

    engine._optimizer.step = step


def whole(founds: list[Found], key: str, shapes: dict[str, torch.Size]) -> dict[str, torch.Tensor]:
    """Put the parts of all ranks together; where ranks have the same, they must agree."""
    result = {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}
    for found in founds:
        for name, place, part in found[key]:
            before = result[name][place]
            assert torch.equal(before.where(~before.isnan(), part), part), f"{name}: ranks differ"
            result[name][place] = part
    missing = [name for name, tensor in result.items() if tensor.isnan().any()]
    assert not missing, f"no rank has all of {missing}"
    return result


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
    coming = batches(engine, run)
    for number in range(3):
        engine.train_step(next(coming).micro_batches, **rates(number))
    progress = {"iteration": 3, "consumed_samples": 24, "consumed_tokens": 24 * 16}
    saving = engine.save(move.folder, progress)
    found: Found = {"saved": states(engine)}
    found["losses after saving"] = _go_on(engine, coming)
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
    found["losses after loading"] = _go_on(engine, batches(engine, run, done=3))
    found["end after loading"] = states(engine)
    return found


def _go_on(engine: Any, coming: Iterator[Step]) -> list[float]:
    return [
        engine.train_step(next(coming).micro_batches, **rates(number)).loss
        for number in range(3, 6)
    ]


def states(engine: Any) -> list[tuple[str, Any, Any, torch.Tensor]]:
    """Key, whole shape, place and copy of what this rank holds: weights and optimizer states."""
    found: list[tuple[str, Any, Any, torch.Tensor]] = []
    pieces = getattr(engine, "_pieces", ())
    for piece in pieces:
        state = engine._optimizer.state.get(piece.flat, {})
        for kind, value in {"model": piece.flat, **state}.items():
            key = f"{kind}.{piece.held.saved_name}"
            if value.shape != piece.flat.shape:
                found.append((key, value.shape, ..., value.clone()))
                continue
            found += [(key, piece.held.shape, *rest) for _, *rest in parts(piece, value)]
    for held in () if pieces else engine._held:
        state = engine._optimizer.state.get(held.local, {})
        for kind, value in {"model": held.local.detach(), **state}.items():
            like = value.shape == held.local.shape
            shape, place = (held.shape, held.place) if like else (value.shape, ...)
            found.append((f"{kind}.{held.saved_name}", shape, place, value.clone()))
    return found
