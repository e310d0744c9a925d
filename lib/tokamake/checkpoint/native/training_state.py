"""Save and load the training state in torch's distributed checkpoint (DCP), for any layout.

Each rank saves the parts that it holds; ranks of another layout load the parts that they need.
Keys: model.NAME and optimizer.KIND.NAME, NAME being the tensor name, and rank.NUMBER for the state
of one rank.
"""

import io
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from tokamake import files
from tokamake.checkpoint.native.dcp_storage import DcpReader, DcpWriter
from tokamake.checkpoint.native.folder import DESCRIPTION, VERSION, read_description
from tokamake.checkpoint.torch_files import dcp_metadata
from tokamake.errors import UserError
from tokamake.parallel.mesh import Mesh
from tokamake.parallel.sharding import ParameterChunk, shard_placement
from tokamake.runtime.rank_errors import raise_on_all_ranks
from tokamake.runtime.torch_internals import mesh_without_groups

Tensors = dict[str, Any]


class StateLayout:
    """Turns this rank's tensors into parts of whole tensors."""

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        self._mesh, self._device_type = mesh, device.type
        self._meshes: dict[tuple[str, ...], DeviceMesh] = {}

    def whole(self, chunk: ParameterChunk, local: Tensor) -> Tensor:
        """Wrap this rank's part of a parameter, or of its state, as a part of the whole tensor."""
        dim, axes = chunk.placement.dim, chunk.placement.axes
        if self._mesh.copy_grid([name for name, _ in axes]).numel() == 1:
            return local
        tensor_placement: Placement = Replicate() if dim is None else Shard(dim)
        of_shards: Placement = shard_placement(chunk.parameter) or Replicate()
        of_axes = (Shard(dim) for _, dim in axes)
        stride = torch.empty(chunk.shape, device="meta").stride()
        return DTensor.from_local(
            local.detach(),
            self._device_mesh(tuple(name for name, _ in axes)),
            [tensor_placement, *of_axes, of_shards],
            run_check=False,
            shape=chunk.shape,
            stride=stride,
        )

    def _device_mesh(self, axes: tuple[str, ...]) -> DeviceMesh:
        if axes not in self._meshes:
            # Tensor parallelism first: shards are parts of a tensor-parallel rank's tensor.
            names = ("tensor", *axes, "shards")
            ranks = self._mesh.copy_grid(axes)
            self._meshes[axes] = mesh_without_groups(self._device_type, ranks, names=names)
        return self._meshes[axes]


def tensors_of(
    chunks: list[ParameterChunk],
    states: Mapping[Tensor, dict[str, Any]],
    *,
    layout: StateLayout,
    kinds: Mapping[str, str],
) -> Tensors:
    """Return the weights and optimizer states that this rank holds a part of, by key.

    `states`: by `ParameterChunk.local`: tensors of its shape, or equal on all ranks.
    """
    tensors: Tensors = {}
    for parameter in chunks:
        tensors[f"model.{parameter.saved_name}"] = layout.whole(parameter, parameter.local)
        for kind, value in states.get(parameter.local, {}).items():
            is_partial = kinds[kind] == "like_parameter"
            key = f"optimizer.{kind}.{parameter.saved_name}"
            tensors[key] = layout.whole(parameter, value) if is_partial else value
    return tensors


def save(
    folder: Path,
    tensors: Tensors,
    *,
    description: dict[str, Any],
    rank_state: Any,
    group: dist.ProcessGroup,
) -> "Future[Any]":
    """Start to write a checkpoint; all ranks call it. The tensors may change when it returns.

    Args:
        rank_state: state of this rank; `load` returns it if the number of ranks is the same.
        group: all ranks, on gloo. Nothing else may use it: the writing thread does.
    """
    rank = dist.get_rank()
    with raise_on_all_ranks():
        if rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            header = {"version": VERSION, "world_size": dist.get_world_size()}
            files.write_json(folder / DESCRIPTION, {**header, **description})
    state = {**tensors, f"rank.{rank}": _to_bytes(rank_state)}
    # DCP's default options where it makes the writer itself: a plain copy, not pinned or shared.
    stager = DefaultStager(StagingOptions(False, False, False, False))
    future = dcp.async_save(
        state, storage_writer=DcpWriter(folder), async_stager=stager, process_group=group
    )
    assert isinstance(future, Future)
    future.add_done_callback(lambda _: stager.close())
    return future


def make_state(
    folder: Path,
    chunks: list[ParameterChunk],
    *,
    optimizer: torch.optim.Optimizer,
    kinds: Mapping[str, str],
) -> None:
    """Allocate the states of an optimizer that a checkpoint has, for `load` to fill."""
    saved = dcp_metadata.read(folder)
    for parameter in chunks:
        local = parameter.local
        for kind, shape_kind in kinds.items():
            tensor = saved.get(f"optimizer.{kind}.{parameter.saved_name}")
            if tensor is None:
                continue
            shape = local.shape if shape_kind == "like_parameter" else tensor.size
            optimizer.state[local][kind] = room(shape, tensor.dtype.torch, local, optimizer)


def room(
    shape: tuple[int, ...], dtype: torch.dtype, parameter: Tensor, optimizer: torch.optim.Optimizer
) -> Tensor:
    """Return zeros for a state of a parameter, on the device where the optimizer keeps it."""
    # torch's fused optimizers keep step counts on the device, all other optimizers on the CPU.
    is_cpu_count = not shape and not optimizer.defaults.get("fused")
    device = torch.device("cpu") if is_cpu_count else parameter.device
    return torch.zeros(shape, dtype=dtype, device=device)


def check(folder: Path, tensors: Tensors) -> None:
    """Check that a checkpoint has tensors of these names and shapes."""
    saved = dcp_metadata.read(folder)
    for name, tensor in tensors.items():
        if (saved_tensor := saved.get(name)) is None:
            raise UserError(f"{folder}: has no {name}; name a checkpoint saved with these settings")
        if list(saved_tensor.size) != list(tensor.shape):
            raise UserError(
                f"{folder}: {name} has the shape {list(saved_tensor.size)}, the model calls for "
                f"{list(tensor.shape)}; name another checkpoint"
            )


def fill(folder: Path, tensors: Tensors) -> None:
    """Fill tensors in place from a checkpoint of any layout; each rank reads its own parts.

    All ranks call it, and all raise UserError for a damaged file.
    """
    try:
        dcp.load(tensors, storage_reader=DcpReader(folder))
    except dcp.CheckpointException as error:
        message = next((str(failure) for failure, _ in error.failures.values()), "")
        reason = message.partition("\n")[0]
        raise UserError(f"{folder}: damaged ({reason}); name another checkpoint") from None


def load(folder: Path, tensors: Tensors) -> Any:
    """Fill tensors, as `fill` does, and return `rank_state` if the number of ranks is the same.

    All ranks call it.
    """
    rank_key, state = f"rank.{dist.get_rank()}", dict(tensors)
    if read_description(folder)["world_size"] == dist.get_world_size():
        size = dcp_metadata.read(folder)[rank_key].size
        state[rank_key] = torch.empty(size, dtype=torch.uint8)
    fill(folder, state)
    return _from_bytes(state[rank_key]) if rank_key in state else None


def _to_bytes(value: Any) -> Tensor:
    # As one tensor: DCP would split a dictionary into keys of its own, and pickle other values.
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def _from_bytes(tensor: Tensor) -> Any:
    return torch.load(io.BytesIO(tensor.numpy().tobytes()), weights_only=True)
