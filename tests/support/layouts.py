"""Training steps of either back end at any layout; what comes of them, for proofs of layouts."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tests.support.engines import Part, buffer, build, coming, parts, pieces
from tokamake.config.resolved_run import Run, read_run
from tokamake.parallel import document_attention, linear

NUM_STEPS = 20

Found = dict[str, Any]
"""Of one rank: losses, norms, validation before and after; parts of gradients, by updates, and of
weights."""


class Layout(NamedTuple):
    """A way to share a run."""

    config: Path
    """The run.yaml."""
    changes: dict[str, Any]
    """Settings of the section `train` that differ from it."""


def parallel(**sizes: Any) -> dict[str, Any]:
    """Changes of the section `train.parallel`, by short names."""
    names = {
        "tp": "tensor_parallel_size",
        "sp": "sequence_parallel",
        "cp": "context_parallel_size",
        "method": "context_parallel_method",
        "pp": "pipeline_parallel_size",
        "schedule": "pipeline_schedule",
        "vpp": "virtual_pipeline_size",
        "layers": "pipeline_layers",
        "replicas": "data_parallel_replicate_size",
    }
    return {"parallel": {names[name]: value for name, value in sizes.items()}}


def laid_out(run: Run, changes: dict[str, Any]) -> Run:
    """The run with other training settings."""
    train = type(run.train).model_validate({**run.train.model_dump(), **changes})
    return run.model_copy(update={"train": train})


def train_all(layouts: list[Layout]) -> list[Found]:
    """Train once for each layout; all ranks call this, each gets its part."""
    return [train(laid_out(read_run(config), changes)) for config, changes in layouts]


def rates(step: int) -> dict[str, float]:
    """Learning rate and weight decay of a step, from 0."""
    return {"learning_rate": 0.01 * (step + 1) / NUM_STEPS, "weight_decay": 0.1}


def train(run: Run) -> Found:
    """Do steps and say what came of them."""
    # Products and documents are too small here for what large ones take: tied models have the
    # former nevertheless, several ranks the latter.
    linear._FEWEST = 0 if run.architecture.tie_word_embeddings else 2**24
    document_attention._SHORT = 1 if dist.get_world_size() > 1 else 32
    engine = build(run)
    found: Found = {"losses": [], "norms": [], "gradients": []}
    watch(engine, found["gradients"])
    some = coming(engine, run)
    held_out = next(some).micro_batches
    found["validation"] = engine.mean_loss(iter(held_out))
    for number in range(NUM_STEPS):
        result = engine.train_step(next(some).micro_batches, **rates(number))
        found["losses"].append(result.loss)
        found["norms"].append(result.grad_norm)
    found["after"] = engine.mean_loss(iter(held_out))
    found["weights"] = [part for one in pieces(engine) for part in parts(one, buffer(one))]
    return found


def watch(engine: Any, into: list[list[Part]]) -> None:
    """Keep the gradients of each update, clipped, before the optimizer has them."""
    update, every = engine._optimizer.step, pieces(engine)
    wanted: list[Any] = []

    def step(*arguments: Any) -> Any:
        # DeepSpeed updates groups of parameters one after the other, clipping each just before.
        if not wanted:
            wanted.extend(every)
            into.append([])
        now = {id(each) for group in engine._optimizer.param_groups for each in group["params"]}
        for one in [*wanted]:
            if id(buffer(one)) in now:
                into[-1].extend(parts(one, buffer(one).grad))
                wanted.remove(one)
        into[-1] = _packed(into[-1])
        return update(*arguments)

    engine._optimizer.step = step


def _packed(some: list[Part]) -> list[Part]:
    """The same parts in one piece of memory, for each piece takes its time to be sent."""
    *_, tensors = zip(*some, strict=True)
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    cut = flat.split([tensor.numel() for tensor in tensors])
    return [
        (name, shape, place, piece.view_as(tensor))
        for (name, shape, place, tensor), piece in zip(some, cut, strict=True)
    ]
