"""Local parameters and gradients of a rank: sharding, sums over ranks, norms.

Tensor parallelism divides parameters first; FSDP2 shards these parts over data- and
context-parallel ranks. Optimizers get plain local tensors. The backward pass leaves gradients
partial where tensor-parallel ranks replicate a parameter: `add_up_partial` sums them.
`tied_embeddings` sums the gradients of an embedding that two pipeline stages share.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tokamake.parallel.axis import Axis, part
from tokamake.parallel.mesh import Mesh
from tokamake.parallel.placement import Placement
from tokamake.runtime.torch_internals import (
    flatten,
    foreach_copy_,
    foreach_mul_,
    foreach_norm,
    unflatten,
)

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.tensor import DTensor, Shard


@dataclass
class ParameterChunk:
    """This rank's part of a parameter."""

    name: str
    """Name of the parameter in its stage."""
    saved_name: str
    """Tensor name in checkpoints; for a tied output layer, the embedding's name."""
    parameter: nn.Parameter
    """The module's parameter, a DTensor if FSDP2 shards it."""
    local: nn.Parameter
    """This rank's part, for the optimizer. It shares memory with `parameter`, or it holds the fp32
    master weights and `parameter` is their rounded copy."""
    placement: Placement
    """Placement over the ranks of the mesh."""
    shape: torch.Size
    """Shape of the whole parameter."""
    place: tuple[slice, ...]
    """Index of this rank's part in the whole parameter."""
    groups: tuple[dist.ProcessGroup, ...]
    """Groups that divide the parameter: sums over all of them are sums over all parts."""
    is_tied_output: bool
    """Whether this is the output layer's copy of an embedding in another stage."""
    counts: bool
    """Whether this part counts in sums over all ranks; only one of several replicas counts."""

    def take_gradient(self) -> None:
        """Move the gradient of `parameter` to `local`; with master weights, accumulate it there."""
        gradient = self.parameter.grad
        if self.parameter.dtype == self.local.dtype or _is_dtensor(gradient):
            self.local.grad = gradient.to_local() if _is_dtensor(gradient) else gradient
        elif gradient is not None:
            wide = gradient.to(self.local.dtype)
            self.local.grad = wide if self.local.grad is None else self.local.grad.add_(wide)
            self.parameter.grad = None


def shard(
    module: nn.Module,
    blocks: Iterable[nn.Module],
    mesh: Mesh,
    *,
    policy: "MixedPrecisionPolicy",
    reshard_after_forward: bool,
    experts: Iterable[nn.Module] = (),
) -> None:
    """Shard a module's parameters over the mesh with FSDP2; it sums gradients over the ranks.

    Args:
        blocks: submodules whose parameters are gathered together, such as layers.
        experts: submodules of blocks whose parameters differ between the ranks of the expert axis:
            ranks with the same experts shard them.
        reshard_after_forward: whether to free gathered parameters between forward and backward.
    """
    from torch.distributed.fsdp import FSDPModule, fully_shard  # not above: the import takes long

    of_experts = [(each, mesh.expert_shards) for each in experts]
    for block, shards in (*of_experts, *((each, mesh.shards) for each in (*blocks, module))):
        assert shards is not None
        fully_shard(
            block,
            mesh=shards,
            mp_policy=policy,
            reshard_after_forward=reshard_after_forward,
            shard_placement_fn=partial(_shard_placement, num_shards=shards.size(-1)),
        )
        assert isinstance(block, FSDPModule)
        # Losses are sums over tokens, so gradients are summed. Some back ends have no average.
        # An expert has the tokens of all ranks that divide experts: the same sum, over fewer ranks.
        block.set_gradient_divide_factor(1.0)
        block.set_force_sum_reduction_for_comms(True)


def sharded_dim(shape: Sequence[int], num_shards: int) -> int:
    """Dimension of a parameter that FSDP2 divides: the first one.

    Ranks may be more than the matrices of a stack. Then they divide rows or columns, if they can:
    else some ranks would have whole matrices, and others nothing.
    """
    even = [dim for dim, size in enumerate(shape) if size % num_shards == 0]
    return even[0] if even and len(shape) > 2 else 0


def _shard_placement(parameter: Tensor, *, num_shards: int) -> "Shard":
    from torch.distributed.tensor import Shard

    return Shard(sharded_dim(parameter.shape, num_shards))


def shape_parameters(module: nn.Module, device: torch.device) -> None:
    """Move parameters from torch's `meta` device to another one, without storage for their values.

    All elements of a parameter share one place in memory. Buffers have storage.
    """
    for submodule in module.modules():
        for name, parameter in [*submodule.named_parameters(recurse=False)]:
            element = torch.empty((), dtype=parameter.dtype, device=device)
            shaped = nn.Parameter(element.expand(parameter.shape), parameter.requires_grad)
            submodule.register_parameter(name, shaped)
        for name, buffer in [*submodule.named_buffers(recurse=False)]:
            setattr(submodule, name, torch.empty_like(buffer, device=device))


def _is_dtensor(tensor: Tensor | None) -> "TypeGuard[DTensor]":
    """Whether a tensor is a DTensor; the class itself takes long to import."""
    return hasattr(tensor, "to_local")


def shard_placement(parameter: Tensor) -> "Shard | None":
    """How FSDP2 shards a parameter of a rank; None: it does not."""
    if not _is_dtensor(parameter):
        return None
    placement: Any = parameter.placements[-1]  # with replicas (HSDP), the first one is of these
    return cast("Shard", placement)


def _rows_of(parameter: "DTensor", dim: int) -> slice:
    """Rows along `dim` of this rank's FSDP2 shard, within this rank's tensor-parallel part."""
    mesh = parameter.device_mesh
    last = mesh.ndim - 1
    rows = part(parameter.shape[dim], Axis(mesh.get_local_rank(last), mesh.size(last)))
    return slice(rows.start, rows.stop)


def parameter_chunks(
    model: nn.Module,
    placed: dict[str, Placement],
    *,
    mesh: Mesh,
    shapes: Mapping[str, tuple[int, ...]],
    saved_names: Mapping[str, str],
    tied_output: str | None,
) -> list[ParameterChunk]:
    """Describe this rank's part of each parameter of a stage, tied output layer included."""
    chunks = []
    for name, parameter in model.named_parameters():
        tensor: Tensor = parameter
        local, replica = parameter, 0
        if _is_dtensor(tensor):
            local, replica = nn.Parameter(tensor.to_local()), _replica(tensor)
        first = mesh.tensor.rank == 0 or placed[name].dim is not None
        shape = torch.Size(shapes[saved_names[name]])
        chunks.append(
            ParameterChunk(
                name,
                saved_names[name],
                parameter,
                local,
                placed[name],
                shape=shape,
                place=_place(parameter, shape, placement=placed[name], mesh=mesh),
                groups=_groups(parameter, placed[name], mesh=mesh),
                is_tied_output=name == tied_output,
                counts=first and not replica and name != tied_output,
            )
        )
    return chunks


def buffer_chunks(model: nn.Module, *, tensor_name: Callable[[str], str]) -> list[ParameterChunk]:
    """Describe tensors of a stage that every rank has whole, and that no gradient changes."""
    chunks = []
    for name, buffer in model.named_buffers():
        shared = nn.Parameter(buffer, requires_grad=False)  # in the memory of the buffer
        place = tuple(slice(0, size) for size in buffer.shape)
        chunks.append(
            ParameterChunk(
                name,
                tensor_name(name),
                shared,
                shared,
                Placement(),
                shape=buffer.shape,
                place=place,
                groups=(),
                is_tied_output=False,
                counts=False,
            )
        )
    return chunks


def _place(
    parameter: Tensor, shape: torch.Size, *, placement: Placement, mesh: Mesh
) -> tuple[slice, ...]:
    ranges = [range(size) for size in shape]
    splits = [] if placement.dim is None else [("tensor", placement.dim)]
    for axis, dim in (*splits, *placement.axes):
        rows = part(len(ranges[dim]), mesh.axis(axis))
        ranges[dim] = ranges[dim][rows.start : rows.stop]
    if _is_dtensor(parameter) and (sharded := shard_placement(parameter)):
        # FSDP2 divides a rank's tensor-parallel part.
        ranges[sharded.dim] = ranges[sharded.dim][_rows_of(parameter, sharded.dim)]
    return tuple(slice(rows.start, rows.stop) for rows in ranges)


def _groups(
    parameter: Tensor, placement: Placement, *, mesh: Mesh
) -> tuple[dist.ProcessGroup, ...]:
    axes = [] if placement.dim is None else [mesh.tensor]
    axes += [mesh.axis(name) for name, _ in placement.axes]
    groups = [axis.group for axis in axes if axis.group is not None]
    if _is_dtensor(parameter) and parameter.device_mesh.size(-1) > 1:
        # With replicas (HSDP), the first dimension of this mesh holds them; the last one shards.
        groups.append(parameter.device_mesh.get_group(-1))
    return tuple(groups)


def _replica(parameter: "DTensor") -> int:
    mesh = parameter.device_mesh
    return mesh.get_local_rank(0) if mesh.ndim > 1 else 0


def gradient_of(chunk: ParameterChunk) -> Tensor | None:
    return chunk.local.grad


@torch.no_grad()
def keep_master_weights(chunks: Iterable[ParameterChunk], dtype: torch.dtype) -> None:
    """Keep the parameters as master weights and round the module's copies to `dtype`."""
    for each in chunks:
        each.local = nn.Parameter(each.parameter.detach())
        each.parameter.data = each.local.to(dtype)


@torch.no_grad()
def round_master_weights(chunks: Iterable[ParameterChunk]) -> None:
    """Copy updated master weights, rounded, into the module's parameters."""
    rounded = [each for each in chunks if each.parameter.dtype != each.local.dtype]
    if rounded:
        copies: list[Tensor] = [each.parameter for each in rounded]
        foreach_copy_(copies, [*(each.local for each in rounded)])


def add_up_partial(
    shards: Iterable[ParameterChunk],
    axis: Axis,
    *,
    gradient: Callable[[ParameterChunk], Tensor | None] = gradient_of,
) -> None:
    """All-reduce the gradients that are partial on each tensor-parallel rank, in one call."""
    if axis.size == 1:
        return
    gradients = [gradient(each) for each in shards if each.placement.partial]
    _all_reduce([each for each in gradients if each is not None], axis.group)


def _all_reduce(tensors: list[Tensor], group: dist.ProcessGroup | None) -> None:
    if not tensors:
        return
    # One collective for all: for many small ones, latency costs more than this copy.
    flat = flatten(tensors)
    dist.all_reduce(flat, group=group)
    for tensor, total in zip(tensors, unflatten(flat, tensors), strict=True):
        tensor.copy_(total)


def squares(chunks: Iterable[ParameterChunk], device: torch.device) -> Tensor:
    """Sum of squares of this rank's gradients, fp32 scalar; only one of several replicas counts."""
    counted = [each.local.grad for each in chunks if each.counts and each.local.grad is not None]
    norms = foreach_norm(counted, dtype=torch.float32) if counted else ()
    return torch.stack([*norms]).square().sum() if norms else torch.zeros((), device=device)


def squares_by_layer(
    chunks: Iterable[ParameterChunk],
    num_layers: int,
    *,
    number_of: Callable[[str], int | None],
    device: torch.device,
) -> Tensor:
    """Sums of squares of this rank's gradients, as `squares`, for each layer.

    Args:
        number_of: number of the layer of a parameter, by its name; None: it is in no layer.

    Returns:
        (num_layers + 1,) fp32; the last sum is of all parameters outside layers.
    """
    by_layer: list[list[ParameterChunk]] = [[] for _ in range(num_layers + 1)]
    for chunk in chunks:
        number = number_of(chunk.name)
        by_layer[num_layers if number is None else number].append(chunk)
    return torch.stack([squares(chunks, device) for chunks in by_layer])


def scale(chunks: Iterable[ParameterChunk], factor: float) -> None:
    """Multiply this rank's gradients in place."""
    if factor != 1:
        gradients = [each.local.grad for each in chunks if each.local.grad is not None]
        foreach_mul_(gradients, factor)
