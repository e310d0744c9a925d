"""The ranks of a run as a mesh of pipeline, data, context and tensor parallelism.

The section `parallel` of the config sets the sizes. Models and back ends get a `Mesh` as an
argument; there is no global state. Tensor-parallel ranks are consecutive; then come context, data
and pipeline, as in Megatron. Ranks that divide experts are consecutive ones of context and data.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tokamake.parallel.axis import SINGLE_RANK_AXIS, Axis
from tokamake.parallel.exchange_log import ExchangeLog

if TYPE_CHECKING:
    from tokamake.config.parallel import ParallelSettings


@dataclass(frozen=True)
class Mesh:
    """The mesh as seen by this rank. The default is the mesh of a single rank."""

    tensor: Axis = SINGLE_RANK_AXIS
    """Ranks that divide each layer."""
    context: Axis = SINGLE_RANK_AXIS
    """Ranks that divide each sequence."""
    data: Axis = SINGLE_RANK_AXIS
    """Ranks that divide each global batch."""
    expert: Axis = SINGLE_RANK_AXIS
    """Ranks, of the data- and context-parallel ones, that divide the experts of each layer."""
    pipeline: Axis = SINGLE_RANK_AXIS
    """Ranks that divide the layers into stages."""
    sequence_parallel: bool = False
    """Whether tensor-parallel ranks divide the sequence between their layers."""
    context_method: Literal["ring", "ulysses"] = "ring"
    """Method of attention over context-parallel ranks."""
    shards: DeviceMesh | None = None
    """Ranks over which FSDP2 shards parameters: one dimension, or (replicas, shards) for HSDP."""
    copy: tuple[tuple[int, ...], ...] = ((0,),)
    """Global ranks that together hold one copy of this stage: [tensor-parallel rank][shard]."""
    expert_shards: DeviceMesh | None = None
    """As `shards`, for experts: each rank shards its own; None: no ranks divide experts."""
    expert_copy: tuple[tuple[int, ...], ...] = ()
    """As `copy`, for experts: those that divide experts are consecutive; empty: as `copy`."""
    log: ExchangeLog = field(default_factory=ExchangeLog, compare=False, repr=False)
    """Log of this rank's exchanges on all axes."""

    def axis(self, name: str) -> Axis:
        axis: Axis = getattr(self, name)
        return axis

    def copy_grid(self, axes: Sequence[str] = ()) -> torch.Tensor:
        """Global ranks of a copy: [tensor-parallel rank][rank on each of the axes][shard].

        Ranks on one of the further axes are consecutive shards.
        """
        ranks = torch.tensor(self.expert_copy if axes and self.expert_copy else self.copy)
        for name in axes:
            ranks = ranks.unflatten(-1, (-1, self.axis(name).size)).transpose(-1, -2)
        return ranks


SINGLE_RANK = Mesh()
"""The mesh of a single rank."""


def planned(settings: "ParallelSettings") -> Mesh:
    """The mesh of the first rank of a run, without groups: parameters have the shapes of a rank."""
    return Mesh(
        tensor=Axis(0, settings.tensor_parallel_size),
        context=Axis(0, settings.context_parallel_size),
        expert=Axis(0, settings.expert_parallel_size),
        sequence_parallel=settings.sequence_parallel,
    )


def build(
    settings: "ParallelSettings", world_size: int, *, device: torch.device, shard: bool = True
) -> Mesh:
    """Build the mesh of a run, whose sizes must divide `world_size`. All ranks call it.

    Args:
        shard: whether data-parallel ranks shard parameters; else each holds all of them.
    """
    data = settings.data_parallel_size(world_size)
    if world_size == 1:
        return Mesh(shards=init_device_mesh(device.type, (1,), mesh_dim_names=("shards",)))
    pipeline, tensor = settings.pipeline_parallel_size, settings.tensor_parallel_size
    context = settings.context_parallel_size
    # Context-parallel ranks have the same parameters, so FSDP2 shards over them, too.
    replicas = settings.data_parallel_replicate_size if shard else data * context
    shards = data * context // replicas
    work = _grid(device, {"pipeline": pipeline, "data": data, "context": context, "tensor": tensor})
    if data > 1 and replicas == context == 1:
        kept = work["data"]
    else:
        sizes = {"pipeline": pipeline, "replicas": replicas, "shards": shards, "tensor": tensor}
        grid = _grid(device, sizes, always="shards")
        kept = grid["replicas", "shards"] if replicas > 1 else grid["shards"]
    expert = settings.expert_parallel_size
    expert_shards = max(1, shards // expert)
    kept_experts, expert_axis, log = None, Axis(), ExchangeLog()
    if expert > 1:
        sizes = {
            "pipeline": pipeline,
            "replicas": data * context // (expert * expert_shards),
            "shards": expert_shards,
            "expert": expert,
            "tensor": tensor,
        }
        grid = _grid(device, sizes, always="shards")
        kept_experts = grid["replicas", "shards"] if sizes["replicas"] > 1 else grid["shards"]
        expert_axis = _axis(grid, "expert", log=log)
    return Mesh(
        tensor=_axis(work, "tensor", log=log),
        context=_axis(work, "context", log=log),
        data=_axis(work, "data", log=log),
        expert=expert_axis,
        pipeline=_axis(work, "pipeline", log=log),
        sequence_parallel=settings.sequence_parallel and tensor > 1,
        context_method=settings.context_parallel_method,
        shards=kept,
        copy=_copy(shards, tensor),
        expert_shards=kept_experts,
        expert_copy=_copy(expert * expert_shards, tensor),
        log=log,
    )


def _copy(shards: int, tensor: int) -> tuple[tuple[int, ...], ...]:
    """Ranks that hold a copy together with this rank, which are consecutive."""
    size = shards * tensor
    first = dist.get_rank() // size * size
    return tuple(tuple(range(first + rank, first + size, tensor)) for rank in range(tensor))


def _grid(device: torch.device, sizes: dict[str, int], *, always: str = "") -> DeviceMesh:
    """Arrange all ranks in a grid, the last dimension fastest.

    Dimensions of size 1 are omitted, except `always`. torch creates the groups of each dimension
    in the same order on all ranks.
    """
    kept = {name: size for name, size in sizes.items() if size > 1 or name == always}
    return init_device_mesh(device.type, tuple(kept.values()), mesh_dim_names=tuple(kept))


def _axis(grid: DeviceMesh, name: str, *, log: ExchangeLog) -> Axis:
    assert grid.mesh_dim_names is not None
    if name not in grid.mesh_dim_names:
        return Axis()
    return Axis(
        grid.get_local_rank(name),
        grid.size(grid.mesh_dim_names.index(name)),
        grid[name].get_group(),
        log,
    )
