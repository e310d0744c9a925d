"""Training steps of the native back end at any layout, gathered whole, for proofs of layouts."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tokamake.config import Run, read_run
from tokamake.data.samples.loader import Samples, steps
from tokamake.runtime import Ranks
from tokamake.train.backends.native import Engine

NUM_STEPS = 20

Found = dict[str, Any]
"""Of one rank: losses, norms, validation; gradients and weights as (place, part) by name."""


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
    rank, size = dist.get_rank(), dist.get_world_size()
    engine = Engine(run, Ranks(rank, size, rank, size), torch.device("cpu"))
    found: Found = {"losses": [], "norms": [], "gradients": {}}
    watch(engine, found["gradients"])
    coming = steps(
        Samples(run.index, split="train", data_root=run.data_root),
        run.train.batch_sizes,
        consumed_samples=0,
        micro_batch_size=run.train.micro_batch_size,
        data_parallel_rank=engine.mesh.data.rank,
        data_parallel_size=engine.mesh.data.size,
    )
    found["validation"] = engine.mean_loss(iter(next(coming).micro_batches))
    for number in range(NUM_STEPS):
        result = engine.train_step(next(coming).micro_batches, **rates(number))
        found["losses"].append(result.loss)
        found["norms"].append(result.grad_norm)
    found["weights"] = {h.saved_name: (h.place, h.local.detach().clone()) for h in engine._held}
    return found


def watch(engine: Engine, into: dict[str, Any]) -> None:
    """Keep the gradients of the first update, clipped, before the optimizer has them."""
    update = engine._optimizer.step

    def step(*arguments: Any) -> Any:
        if not into:
            for held in engine._held:
                assert held.local.grad is not None
                into[held.saved_name] = held.place, held.local.grad.clone()
        return update(*arguments)

    engine._optimizer.step = step  # type: ignore[method-assign]


def whole(founds: list[Found], key: str, shapes: dict[str, torch.Size]) -> dict[str, torch.Tensor]:
    """Put the parts of all ranks together; ranks with the same part must have the same numbers."""
    result = {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}
    for found in founds:
        for name, (place, part) in found[key].items():
            before = result[name][place]
            assert torch.equal(before.where(~before.isnan(), part), part), f"{name}: ranks differ"
            result[name][place] = part
    missing = [name for name, tensor in result.items() if tensor.isnan().any()]
    assert not missing, f"no rank has all of {missing}"
    return result
