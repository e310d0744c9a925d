"""The weights that a run starts from: each rank reads, or draws, the chunks that it holds."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor

from tokamake.checkpoint import model_tensors
from tokamake.checkpoint.native import training_state
from tokamake.checkpoint.native.flat_chunks import FlatChunks, Offset
from tokamake.config.architecture import Architecture
from tokamake.config.resolved_run import Run
from tokamake.errors import UserError
from tokamake.parallel.sharding import ParameterChunk
from tokamake.preflight.initial_checkpoint import describe_initial_checkpoint
from tokamake.preflight.initial_experts import starts_experts
from tokamake.preflight.initial_towers import initial_names, starts_towers
from tokamake.runtime.rank_errors import raise_on_all_ranks
from tokamake.runtime.ranks import Ranks
from tokamake.train.backends._initial_experts import ExpertStart

Weights = Sequence[tuple[ParameterChunk, FlatChunks]]
"""This rank's parameter shards."""


def load_initial_weights(weights: Weights, run: Run, *, ranks: Ranks) -> None:
    """Fill the chunks from the initial checkpoint, or with random numbers."""
    if run.checkpoint is None:
        _draw(weights, run)
        return
    with raise_on_all_ranks():
        start = describe_initial_checkpoint(run)
    names: list[str] = [""] * ranks.world_size
    dist.all_gather_object(names, start.path.name)
    if len({*names}) > 1:
        raise UserError(
            f"{run.checkpoint}: its file `latest` has changed while ranks started; end the run "
            "that trains there, and rerun"
        )
    experts = None
    if starts_towers(start.architecture, run.architecture):
        reads = _reads_of_towers(weights, run, encoder=start.architecture)
    elif starts_experts(start.architecture, run.architecture):
        experts = ExpertStart(weights, run, dense=start.architecture)
        reads = [*_reads(experts.others), *experts.reads()]
    else:
        reads = _reads(weights)
    for tensors in reads:
        with raise_on_all_ranks():
            training_state.check(start.path, tensors)
        training_state.fill(start.path, tensors)
    if experts:
        experts.finish()
    check_finite(weights, start.path)


def _reads(weights: Weights) -> list[dict[str, FlatChunks]]:
    """Tensors to read, by key."""
    # A copy has the key of its original, so that one dict cannot hold both.
    return [
        {
            f"model.{chunk.saved_name}": flat_chunks
            for chunk, flat_chunks in weights
            if chunk.is_tied_output == copies
        }
        for copies in (False, True)
    ]


def _reads_of_towers(
    weights: Weights, run: Run, *, encoder: Architecture
) -> list[dict[str, FlatChunks]]:
    """Tensors to read for each tower, by key in the encoder's checkpoint; draw new tensors."""
    names, stored = initial_names(run.architecture), model_tensors.shapes(encoder)
    reads: dict[str, dict[str, FlatChunks]] = {
        name.split(".")[1]: {} for name in model_tensors.shapes(run.architecture)
    }
    drawn = []
    for chunk, flat_chunks in weights:
        name = names[chunk.saved_name]
        if name in stored:
            reads[chunk.saved_name.split(".")[1]][f"model.{name}"] = flat_chunks
        else:
            drawn.append((chunk, flat_chunks))
    _draw(drawn, run, names=names)
    return [*reads.values()]


def check_finite(weights: Weights, start: Path) -> None:
    """Check that no weight that was read from a checkpoint is NaN or infinite."""
    with raise_on_all_ranks():
        for chunk, flat_chunks in weights:
            if not all(values.isfinite().all() for values in flat_chunks.chunks.values()):
                raise UserError(
                    f"{start}: model.{chunk.saved_name} holds NaN or infinity; name another "
                    "checkpoint"
                )


def _draw(weights: Weights, run: Run, *, names: Mapping[str, str] = MappingProxyType({})) -> None:
    """Draw the chunks, under the names that some have; threads share the tensors."""
    random = model_tensors.random_weights(run.architecture, run.seed)

    def draw(chunk: ParameterChunk, offset: Offset, values: Tensor) -> None:
        pairs = zip(offset, values.shape, strict=True)
        place = tuple(slice(first, first + size) for first, size in pairs)
        name = names.get(chunk.saved_name, chunk.saved_name)
        for at, drawn in random.tiles(name, chunk.shape, place=place):
            values[at] = torch.from_numpy(drawn)

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        tasks = [
            pool.submit(draw, chunk, offset, values)
            for chunk, flat_chunks in weights
            for offset, values in flat_chunks.chunks.items()
        ]
        for task in tasks:
            task.result()
