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

from tokamake.parallel.axis import LONE, Axis

if TYPE_CHECKING:
    from tokamake.config.parallel import ParallelSettings


@dataclass(frozen=True)
class Mesh:
    """This rank's place among all. The default is a rank alone, where nothing is parallel."""

    tensor: Axis = LONE
    """Ranks that share each layer."""
    context: Axis = LONE
    """Ranks that share each sequence."""
    data: Axis = LONE
    """Ranks that share each global batch."""
    pipeline: Axis = LONE
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
    work = _grid(device, {"pipeline": pipeline, "data": data, "context": context, "tensor": tensor})
    if data > 1 and replicas == context == 1:
        kept = work["data"]
    else:
        sizes = {"pipeline": pipeline, "replicas": replicas, "shards": shards, "tensor": tensor}
        grid = _grid(device, sizes, always="shards")
        kept = grid["replicas", "shards"] if replicas > 1 else grid["shards"]
    # Copies lie one after the other.
    first = dist.get_rank() // (shards * tensor)
    ranks = torch.arange(shards * tensor) + first * shards * tensor
    return Mesh(
        tensor=_axis(work, "tensor"),
        context=_axis(work, "context"),
        data=_axis(work, "data"),
        pipeline=_axis(work, "pipeline"),
        sequence_parallel=settings.sequence_parallel and tensor > 1,
        context_method=settings.context_parallel_method,
        shards=kept,
        copy=tuple(map(tuple, ranks.view(shards, tensor).T.tolist())),
    )


def _grid(device: torch.device, sizes: dict[str, int], always: str = "") -> DeviceMesh:
    """All ranks, the last dimension fastest; those of size 1 are left out but for one.

    Each dimension makes a group for every place in the others, one after the other, on all ranks.
    """
    kept = {name: size for name, size in sizes.items() if size > 1 or name == always}
    return init_device_mesh(device.type, tuple(kept.values()), mesh_dim_names=tuple(kept))


def _axis(grid: DeviceMesh, name: str) -> Axis:
    assert grid.mesh_dim_names is not None
    if name not in grid.mesh_dim_names:
        return Axis()
    return Axis(
        grid.get_local_rank(name),
        grid.size(grid.mesh_dim_names.index(name)),
        grid[name].get_group(),
    )
