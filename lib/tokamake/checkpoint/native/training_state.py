"""tokamake's own checkpoints: torch's distributed checkpoint (DCP), of any layout for any other.

What a rank holds comes from the trainer, files of a folder go out, and back at another number of
ranks; `read` gives whole tensors without any. Keys: model.NAME and optimizer.KIND.NAME with Hugging
Face's names, rank.NUMBER for what only that rank knows.
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
from tokamake.checkpoint.native import dcp_metadata
from tokamake.checkpoint.native.dcp_metadata import WholeTensor
from tokamake.checkpoint.native.dcp_reader import DcpReader
from tokamake.checkpoint.native.dcp_writer import DcpWriter
from tokamake.checkpoint.native.folder import DESCRIPTION, VERSION, read_description, read_model
from tokamake.config.architecture import Architecture
from tokamake.errors import UserError
from tokamake.parallel.mesh import Mesh
from tokamake.parallel.sharding import Held
from tokamake.runtime.rank_errors import raise_on_all_ranks

Tensors = dict[str, Any]


class StateLayout:
    """How this rank's tensors make up the whole ones.

    Args:
        mesh: this rank among its peers.
        device: of the tensors.
    """

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        self._mesh: DeviceMesh | None = None
        ranks = torch.tensor(mesh.copy)
        if ranks.numel() > 1:
            # Tensor parallelism comes first: it cuts what the shards are cut from.
            names = ("tensor", "shards")
            self._mesh = DeviceMesh(
                device.type, ranks, mesh_dim_names=names, _init_backend=False, _rank=dist.get_rank()
            )

    def whole(self, held: Held, local: Tensor) -> Tensor:
        """A tensor of a parameter's shape, or of its shard's, as a part of the whole one."""
        if self._mesh is None:
            return local
        dim = held.placement.dim
        of_tensor: Placement = Replicate() if dim is None else Shard(dim)
        sharded = isinstance(held.parameter, DTensor)
        of_shards: Placement = Shard(0) if sharded else Replicate()
        stride = torch.empty(held.shape, device="meta").stride()
        return DTensor.from_local(
            local.detach(),
            self._mesh,
            [of_tensor, of_shards],
            run_check=False,
            shape=held.shape,
            stride=stride,
        )


def tensors_of(
    held: list[Held],
    states: Mapping[Tensor, dict[str, Any]],
    layout: StateLayout,
    kinds: Mapping[str, str],
) -> Tensors:
    """Weights and optimizer states that this rank has a part in, by their keys.

    Args:
        held: parameters.
        states: of the optimizer, by `Held.local`: tensors of its shape, or alike on all ranks.
        layout: how they make up whole tensors.
        kinds: STATE of the optimizer's plug-in.
    """
    found: Tensors = {}
    for one in held:
        found[f"model.{one.saved_name}"] = layout.whole(one, one.local)
        for kind, value in states.get(one.local, {}).items():
            cut = kinds[kind] == "like_parameter"
            key = f"optimizer.{kind}.{one.saved_name}"
            found[key] = layout.whole(one, value) if cut else value
    return found


def save(
    folder: Path,
    tensors: Tensors,
    *,
    description: dict[str, Any],
    rank_state: Any,
    group: dist.ProcessGroup,
) -> "Future[Any]":
    """Begin to write a checkpoint; all ranks call it. The tensors may change once it returns.

    Args:
        folder: where the files go.
        tensors: from `tensors_of`.
        description: architecture and progress, for `describe`.
        rank_state: what this rank wants back at the same number of ranks.
        group: all ranks, of gloo, for nothing else.

    Returns:
        What ends when this rank's files are written.
    """
    rank = dist.get_rank()
    with raise_on_all_ranks():
        if rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            known = {"version": VERSION, "world_size": dist.get_world_size(), **description}
            files.write_json(folder / DESCRIPTION, known)
    state = {**tensors, f"rank.{rank}": _to_bytes(rank_state)}
    # As DCP takes where it makes the writer, too: a copy at once, neither pinned nor shared.
    stager = DefaultStager(StagingOptions(False, False, False, False))
    found = dcp.async_save(
        state, storage_writer=DcpWriter(folder), async_stager=stager, process_group=group
    )
    assert isinstance(found, Future)
    found.add_done_callback(lambda _: stager.close())
    return found


def make_state(
    folder: Path,
    held: list[Held],
    optimizer: torch.optim.Optimizer,
    kinds: Mapping[str, str],
) -> None:
    """Make room in an optimizer for the states that a checkpoint has.

    Args:
        folder: the checkpoint.
        held: parameters.
        optimizer: of which `Held.local` are the parameters.
        kinds: STATE of the optimizer's plug-in.
    """
    known = saved_in(folder)
    for one in held:
        for kind, like in kinds.items():
            found = known.get(f"optimizer.{kind}.{one.saved_name}")
            if found is None:
                continue
            shape = one.local.shape if like == "like_parameter" else found.size
            state = room(shape, found.dtype.torch, one.local, optimizer)
            optimizer.state[one.local][kind] = state


def room(
    shape: tuple[int, ...], dtype: torch.dtype, parameter: Tensor, optimizer: torch.optim.Optimizer
) -> Tensor:
    """Zeros for a state of a parameter, where the optimizer has it."""
    # torch's fused optimizers count steps on the device, all others on the CPU.
    counts = not shape and not optimizer.defaults.get("fused")
    device = torch.device("cpu") if counts else parameter.device
    return torch.zeros(shape, dtype=dtype, device=device)


def saved_in(folder: Path) -> dict[str, WholeTensor]:
    """Shapes and number formats of the tensors in a checkpoint, by key."""
    return dcp_metadata.read(folder)


def check(folder: Path, tensors: Tensors) -> None:
    """See that a checkpoint has tensors of these names and shapes.

    Raises:
        UserError: it has not.
    """
    known = saved_in(folder)
    for name, tensor in tensors.items():
        if (found := known.get(name)) is None:
            raise UserError(f"{folder}: has no {name}; was it saved with other settings?")
        if list(found.size) != list(tensor.shape):
            raise UserError(
                f"{folder}: {name} has the shape {list(found.size)}, the model here calls for "
                f"{list(tensor.shape)}; name another checkpoint"
            )


def fill(folder: Path, tensors: Tensors, *, alone: bool = False) -> None:
    """Fill tensors, in place, from a checkpoint of any layout, of which each rank reads its parts.

    Args:
        folder: the checkpoint.
        tensors: by key, as `check` has seen them.
        alone: whether this rank alone calls it; else all do.

    Raises:
        UserError: a file is missing or damaged; all ranks raise it.
    """
    try:
        dcp.load(tensors, storage_reader=DcpReader(folder), no_dist=alone)
    except dcp.CheckpointException as error:
        reason = next((str(found) for found, _ in error.failures.values()), "")
        first = reason.partition("\n")[0]
        raise UserError(f"{folder}: damaged ({first}); name another checkpoint") from None


def load(folder: Path, tensors: Tensors) -> Any:
    """Fill tensors, as `fill` does; all ranks call it.

    Returns:
        What this rank gave as `rank_state`; None if there were not as many ranks.
    """
    own, state = f"rank.{dist.get_rank()}", dict(tensors)
    if read_description(folder)["world_size"] == dist.get_world_size():
        size = saved_in(folder)[own].size
        state[own] = torch.empty(size, dtype=torch.uint8)
    fill(folder, state)
    return _from_bytes(state[own]) if own in state else None


def _to_bytes(value: Any) -> Tensor:
    """One tensor, of which DCP makes no keys of its own."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def _from_bytes(tensor: Tensor) -> Any:
    return torch.load(io.BytesIO(tensor.numpy().tobytes()), weights_only=True)


def read(folder: Path) -> tuple[Architecture, dict[str, Tensor], int]:
    """Architecture, whole weights by Hugging Face's names, and step; no ranks needed."""
    architecture, iteration = read_model(folder)
    tensors = {
        key: torch.empty(value.size, dtype=value.dtype.torch)
        for key, value in saved_in(folder).items()
        if key.startswith("model.")
    }
    fill(folder, tensors, alone=True)
    weights = {key.removeprefix("model."): value for key, value in tensors.items()}
    return architecture, weights, iteration
