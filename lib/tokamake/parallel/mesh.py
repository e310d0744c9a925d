"""The ranks of a run as a mesh of pipeline, data, context and tensor parallelism.

Sizes come from the config's `parallel` section; models and engines get a `Mesh` value and never ask
for ranks elsewhere. Tensor-parallel peers are neighbours, then context, data, pipeline, as in
Megatron.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

if TYPE_CHECKING:
    from tokamake.config import ParallelSettings


@dataclass(frozen=True)
class Axis:
    """One direction of the mesh, as this rank sees it."""

    rank: int = 0
    """This rank's place in it, 0 to size - 1."""
    size: int = 1
    """Ranks in it."""
    group: dist.ProcessGroup | None = None
    """Process group of these ranks; None where this rank is alone."""


@dataclass(frozen=True)
class Mesh:
    """This rank's place among all. The default is a rank alone, where nothing is parallel."""

    tensor: Axis = Axis()
    """Ranks that share each layer."""
    context: Axis = Axis()
    """Ranks that share each sequence."""
    data: Axis = Axis()
    """Ranks that share each global batch."""
    pipeline: Axis = Axis()
    """Ranks that share the layers."""
    sequence_parallel: bool = False
    """Whether tensor-parallel ranks also share what lies between their layers, by sequence."""
    context_method: Literal["ring", "ulysses"] = "ring"
    """How attention works over a shared sequence."""
    shards: DeviceMesh | None = None
    """Ranks over which FSDP2 shards parameters: one dimension, or two where data parallelism
    replicates what it shards (HSDP)."""
    copy: tuple[tuple[int, ...], ...] = ((0,),)
    """Ranks that together have one copy of this stage: [tensor-parallel rank][shard]."""

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank has the end of the pipeline, where the loss is."""
        return self.pipeline.rank == self.pipeline.size - 1


ALONE = Mesh()
"""Where a rank has no peers."""


def build(
    settings: "ParallelSettings", world_size: int, device: torch.device, *, shard: bool = True
) -> Mesh:
    """Make the mesh of a run; all ranks of the process group call this together.

    Args:
        settings: sizes that fit `world_size`.
        world_size: ranks of the run.
        device: of this rank.
        shard: whether data-parallel ranks share what they keep; else each has all of it.

    Raises:
        UserError: the sizes do not divide the number of ranks.
    """
    data = settings.data_parallel_size(world_size)
    if world_size == 1:
        return Mesh(shards=init_device_mesh(device.type, (1,), mesh_dim_names=("shards",)))
    pipeline, tensor = settings.pipeline_parallel_size, settings.tensor_parallel_size
    context = settings.context_parallel_size
    # Ranks of a sequence have the same parameters, so these are sharded over them, too.
    replicas = settings.data_parallel_replicate_size if shard else data * context
    shards = data * context // replicas
    work = init_device_mesh(
        device.type,
        (pipeline, data, context, tensor),
        mesh_dim_names=("pipeline", "data", "context", "tensor"),
    )
    kept = init_device_mesh(
        device.type,
        (pipeline, replicas, shards, tensor),
        mesh_dim_names=("pipeline", "replicas", "shards", "tensor"),
    )
    first = kept["pipeline"].get_local_rank() * replicas + kept["replicas"].get_local_rank()
    ranks = torch.arange(shards * tensor) + first * shards * tensor
    return Mesh(
        tensor=_axis(work["tensor"]),
        context=_axis(work["context"]),
        data=_axis(work["data"]),
        pipeline=_axis(work["pipeline"]),
        sequence_parallel=settings.sequence_parallel and tensor > 1,
        context_method=settings.context_parallel_method,
        shards=kept["replicas", "shards"] if replicas > 1 else kept["shards"],
        copy=tuple(map(tuple, ranks.view(shards, tensor).T.tolist())),
    )


def _axis(mesh: DeviceMesh) -> Axis:
    if mesh.size() == 1:
        return Axis()
    return Axis(mesh.get_local_rank(), mesh.size(), mesh.get_group())
