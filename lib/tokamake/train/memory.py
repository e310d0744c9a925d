"""Memory that a run needs on each rank, told before it starts.

Parameters are counted on models without memory; all else is arithmetic on settings. Sizes in bytes.
"""

import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tokamake import plugins
from tokamake.config.parallel import SPLIT_BACKWARD
from tokamake.config.resolved_run import Run
from tokamake.config.training import TrainSettings
from tokamake.parallel.axis import Axis
from tokamake.parallel.mesh import Mesh
from tokamake.parallel.pipeline import stages_of_rank
from tokamake.runtime.ranks import Ranks
from tokamake.train.numerics import precision_of

FP32 = 4
_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_BYTES_OF_STATE = {"adamw_8bit": 1 + FP32 / 256}
"""Of optimizers whose states are no fp32: here blocks of 256 bytes, each with its scale."""


class Estimate(NamedTuple):
    """Most bytes that a rank needs of each kind."""

    weights: float
    """fp32 weights, and copies that passes compute with."""
    gradients: float
    """Sums of gradients."""
    optimizer: float
    """States of the optimizer."""
    activations: float
    """What forward passes keep for backward passes, and logits."""
    together: bool
    """Whether all gradients are there while activations are: from the second micro batch on."""

    @property
    def total(self) -> float:
        """Most bytes at one time; what torch itself takes comes on top."""
        passing = (self.gradients, self.activations)
        most = sum(passing) if self.together else max(passing)
        return self.weights + self.optimizer + most


class _Shape(NamedTuple):
    """What the formulas need of a run on a device."""

    train: TrainSettings
    data: int
    """Data-parallel ranks."""
    num_batches: int
    """Micro batches of a step."""
    size: int
    """Bytes of a number of the passes."""
    device_type: str


def estimate(run: Run, world_size: int, device: torch.device) -> Estimate:
    """Memory of the pipeline rank that needs most.

    With P parameters of a rank as tensor and pipeline parallelism cut them, S ranks that share
    them, b bytes of a number of the passes (4 or 2), D states of the optimizer:

    - weights: 4P/S, and gathered copies, bP in zero_stage 0 to 2, or of the largest layer and of
      what is no layer in 3 (in a pipeline, of all of a stage); no copies where FSDP2 has nothing
      to do (one rank, fp32);
    - gradients: 4P where micro batches of several ranks add up whole ones (zero_stage 0 and 1, in a
      pipeline all), and 4P/S;
    - optimizer: 4DP/S; scalars and sums of rows and columns are left out, and where matrices have
      other states than the rest, all count as if they had all states;
    - activations: of each layer the family's `saved_activations` times the tokens of a micro
      batch on this rank (divided by context-parallel ranks; `states` also by tensor-parallel ones
      under sequence parallelism, `split` always), times the micro batches that are on their way
      through the pipeline; with recomputation `full` the input of each layer (or group of layers),
      and one group whole; with `selective` the results of matrix products and attention;
    - logits: b of tokens × vocabulary of this rank, whose gradient takes their place; of as many
      micro batches as are on their way, where gradients of weights are computed late.

    After Korthikanti et al. 2022, arXiv 2205.05198, with SDPA in place of stored scores.

    Args:
        run: the resolved run; all its ranks are alike in memory but for pipeline ranks.
        world_size: ranks of the run.
        device: kind of device.

    Raises:
        UserError: the layout does not fit the ranks.
    """
    train = run.train
    data = train.parallel.data_parallel_size(world_size)
    shape = _Shape(
        train,
        data,
        num_batches=max(1, train.global_batch_size // (train.micro_batch_size * data)),
        size=_BYTES[precision_of(train, device)],
        device_type=device.type,
    )
    ranks = range(train.parallel.pipeline_parallel_size)
    found = [_of_pipeline_rank(run, shape, rank) for rank in ranks]
    return max(found, key=lambda each: each.total)


def _of_pipeline_rank(run: Run, shape: _Shape, rank: int) -> Estimate:
    train, parallel = run.train, run.train.parallel
    several = shape.data * parallel.context_parallel_size > 1
    copied = several or shape.size != FP32
    # A rank alone keeps rounded copies and sums of gradients by itself.
    fsdp = copied and (several or parallel.pipeline_parallel_size > 1)
    shards = 1
    if train.zero_stage:
        replicas = parallel.data_parallel_replicate_size
        shards = shape.data * parallel.context_parallel_size // replicas
    modules = _modules(run, rank)
    layers = [_count(layer) for module in modules for layer in module.layers.values()]
    total = sum(map(_count, modules))
    # In a pipeline, torch gathers a whole stage, and shares out gradients at the end of a step.
    pipelined = parallel.pipeline_parallel_size > 1
    by_layers = train.zero_stage == 3 and fsdp and not pipelined
    gathered = max(layers) + total - sum(layers) if by_layers else total
    together = shape.num_batches > 1
    whole = together and fsdp and (train.zero_stage < 2 or pipelined)
    name = train.optimizer.name
    states = [*plugins.constant("optim", name, "STATE").values()].count("like_parameter")
    return Estimate(
        weights=FP32 * total / shards + shape.size * gathered * copied,
        gradients=FP32 * total * whole + FP32 * total / shards,
        optimizer=_BYTES_OF_STATE.get(name, FP32) * states * total / shards,
        activations=_activations(run, shape, modules, rank),
        together=together,
    )


def _modules(run: Run, rank: int) -> list[Any]:
    """The stages of a pipeline rank, as the first tensor-parallel rank has them, on no device."""
    parallel, architecture = run.train.parallel, run.architecture
    mesh = Mesh(
        tensor=Axis(0, parallel.tensor_parallel_size),
        context=Axis(0, parallel.context_parallel_size),
        sequence_parallel=parallel.sequence_parallel,
    )
    ranges = parallel.layers_of_stages(architecture.num_hidden_layers)
    numbers = stages_of_rank(
        parallel.pipeline_schedule,
        rank,
        ranks=parallel.pipeline_parallel_size,
        num_stages=parallel.num_stages,
    )
    family = plugins.load("models/*/model", architecture.family)
    with torch.device("meta"):
        return [family.Model(architecture, mesh, ranges[number]) for number in numbers]


def _count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _activations(run: Run, shape: _Shape, modules: list[Any], rank: int) -> float:
    parallel, architecture = run.train.parallel, run.architecture
    tokens = (
        run.train.micro_batch_size * run.train.sequence_length // parallel.context_parallel_size
    )
    on_the_way = _passes(shape, rank) / len(modules)
    layers = sum(_of_layers(run, shape, len(module.layers)) for module in modules)
    logits = 0.0
    if any(module.is_last for module in modules):
        assert architecture.vocab_size is not None
        number = 1
        if parallel.pipeline_schedule == "gpipe":
            number = shape.num_batches
        if parallel.pipeline_schedule in SPLIT_BACKWARD:
            number = min(shape.num_batches, parallel.pipeline_parallel_size)
        if parallel.pipeline_parallel_size == 1:
            number = 1
        logits = number * shape.size * architecture.vocab_size / parallel.tensor_parallel_size
    return tokens * (on_the_way * layers + logits) + _biases(run, shape)


def _passes(shape: _Shape, rank: int) -> float:
    """Passes through a stage of which a pipeline rank keeps activations at once, at most.

    1F1B, interleaved: arXiv 2104.04473; the zero-bubble schedules are made to need no more.
    """
    parallel, batches = shape.train.parallel, shape.num_batches
    ranks, virtual = parallel.pipeline_parallel_size, parallel.virtual_pipeline_size
    if ranks == 1:
        return 1
    if parallel.pipeline_schedule == "gpipe":
        return batches
    if virtual == 1:
        return min(batches, ranks - rank)
    if parallel.pipeline_schedule == "zbv":
        return min(batches * virtual, ranks * virtual)
    return min(batches * virtual, 2 * (ranks - rank - 1) + (virtual - 1) * ranks + 1)


def _of_layers(run: Run, shape: _Shape, count: int) -> float:
    """Bytes that layers of a stage keep of a token."""
    architecture, train = run.architecture, run.train
    tensor = train.parallel.tensor_parallel_size
    sequence = tensor if train.parallel.sequence_parallel else 1
    family = plugins.load("models/*/memory", architecture.family)
    kept = family.saved_activations(
        architecture, size=shape.size, fused_norm=shape.device_type != "cpu"
    )
    layer = kept.states / sequence + kept.gathered + kept.split / tensor
    state = architecture.hidden_size * shape.size / sequence
    if train.recompute_granularity == "none":
        return count * layer
    if train.recompute_granularity == "selective":
        return count * (3 * state + kept.products / tensor) + layer
    if train.recompute_method == "uniform":
        size = min(train.recompute_num_layers, count)
        return -(-count // size) * state + size * layer
    again = min(train.recompute_num_layers, count)
    return again * state + (count - again) * layer + (layer if again else 0)


def _biases(run: Run, shape: _Shape) -> float:
    """Bytes of what is added to scores of attention, or masks them; all layers share it.

    Documents are kept apart by a mask where `parallel.packed` has no better way.
    """
    train, architecture = run.train, run.architecture
    pairs = train.sequence_length**2
    if architecture.position_embedding == "alibi":
        heads = architecture.num_attention_heads // train.parallel.tensor_parallel_size
        rows = train.micro_batch_size if train.reset_attention_mask else 1
        return pairs * heads * rows * shape.size
    flash = shape.device_type == "cuda" and shape.size < FP32
    masked = train.reset_attention_mask and shape.device_type != "cpu" and not flash
    return pairs * train.micro_batch_size * masked


def device_memory(device: torch.device, ranks: Ranks) -> float:
    """Bytes that the device has for this rank: of a host, or of the job's part of it, its share."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[1])
    if device.type == "xpu":
        return float(torch.xpu.get_device_properties(device).total_memory)
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(physical, *_limits()) / ranks.local_size


def _limits(root: Path = Path("/")) -> list[float]:
    """Bytes that control groups let this process have, as batch systems and containers set them.

    Args:
        root: under which proc and sys are.
    """
    found = [math.inf]
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        _, controllers, path = line.split(":", 2)
        base, name = root / "sys/fs/cgroup", "memory.max"
        if controllers:
            if "memory" not in controllers.split(","):
                continue
            base, name = base / "memory", "memory.limit_in_bytes"
        inside = base / path.lstrip("/")
        for folder in (inside, *inside.parents):
            with suppress(OSError, ValueError):
                found.append(float((folder / name).read_text()))
            if folder == base:
                break
    return found
