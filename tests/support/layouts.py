"""Training steps of a back end at any layout, with their results, for proofs of layouts."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tests.support.engines import NamedChunk, build, coming, parts
from tokamake.config.resolved_run import Run, read_run
from tokamake.parallel import attention, linear
from tokamake.prove.engine_tensors import buffer, fragments

NUM_STEPS = 3
"""Steps of a proof."""
NUM_GROWING_STEPS = 7
"""Steps of the proof of a batch size that ramps up over 5 steps."""

RankResults = dict[str, Any]
"""Results on one rank: losses, norms, validation losses before and after; chunks of gradients for
each update, and of weights."""


class Layout(NamedTuple):
    """A run with a parallel layout."""

    config: Path
    """The run.yaml."""
    changes: dict[str, Any]
    """Settings of the section `train` that differ from the run.yaml."""


def parallel(**sizes: Any) -> dict[str, Any]:
    """Settings of the section `train.parallel`, by short names."""
    names = {
        "tp": "tensor_parallel_size",
        "sp": "sequence_parallel",
        "cp": "context_parallel_size",
        "method": "context_parallel_method",
        "ep": "expert_parallel_size",
        "pp": "pipeline_parallel_size",
        "schedule": "pipeline_schedule",
        "vpp": "virtual_pipeline_size",
        "layers": "pipeline_layers",
        "replicas": "data_parallel_replicate_size",
    }
    return {"parallel": {names[name]: value for name, value in sizes.items()}}


def laid_out(run: Run, changes: dict[str, Any]) -> Run:
    """A run with changed training settings."""
    train = type(run.train).model_validate({**run.train.model_dump(), **changes})
    return run.model_copy(update={"train": train})


def train_all(layouts: list[Layout]) -> list[RankResults]:
    """Train once for each layout; all ranks call this, each returns its chunks."""
    return [train(laid_out(read_run(config), changes)) for config, changes in layouts]


def rates(step: int) -> dict[str, float]:
    """Learning rate and weight decay of a step; steps count from 0."""
    return {"learning_rate": 0.0005 * (step + 1), "weight_decay": 0.1}


def train(run: Run, num_steps: int | None = None) -> RankResults:
    """Train some steps; by default as many as a proof needs."""
    if num_steps is None:
        num_steps = NUM_GROWING_STEPS if run.train.rampup_batch_size else NUM_STEPS
    # Matrix products and documents are too small here for the code for large ones. Use that code
    # even so: for products in tied models, for documents on several ranks.
    linear._FEWEST = 0 if run.architecture.tie_word_embeddings else 2**24
    attention._SHORT = 1 if dist.get_world_size() > 1 else 32
    engine = build(run)
    results: RankResults = {"losses": [], "norms": [], "gradients": []}
    watch(engine, results["gradients"])
    steps = coming(engine, run)
    held_out = next(steps).micro_batches
    results["validation"] = engine.validate(iter(held_out)).loss
    for number in range(num_steps):
        result = engine.train_step(next(steps).micro_batches, **rates(number))
        results["losses"].append(result.loss)
        results["norms"].append(result.grad_norm)
    results["after"] = engine.validate(iter(held_out)).loss
    results["weights"] = [
        part for fragment in fragments(engine) for part in parts(fragment, buffer(fragment))
    ]
    return results


def watch(engine: Any, into: list[list[NamedChunk]]) -> None:
    """Record the clipped gradients of each update."""
    update, all_fragments = engine.optimizer.step, fragments(engine)
    remaining: list[Any] = []

    def step(*arguments: Any) -> Any:
        # DeepSpeed clips and updates groups of parameters one after the other.
        if not remaining:
            remaining.extend(all_fragments)
            into.append([])
        groups = engine.optimizer.param_groups
        updated = {id(parameter) for group in groups for parameter in group["params"]}
        for fragment in [*remaining]:
            if id(buffer(fragment)) in updated:
                into[-1].extend(parts(fragment, buffer(fragment).grad))
                remaining.remove(fragment)
        into[-1] = _packed(into[-1])
        return update(*arguments)

    engine.optimizer.step = step


def _packed(chunks: list[NamedChunk]) -> list[NamedChunk]:
    """The same chunks in one block of memory: to send many blocks takes long."""
    *_, tensors = zip(*chunks, strict=True)
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    cut = flat.split([tensor.numel() for tensor in tensors])
    return [
        (name, shape, place, fragment.view_as(tensor))
        for (name, shape, place, tensor), fragment in zip(chunks, cut, strict=True)
    ]
