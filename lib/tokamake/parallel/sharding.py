"""Parameters and gradients of a rank, whichever way the ranks share them: sharding, sums, norms.

FSDP2 shards over data- and context-parallel ranks what tensor parallelism has cut; optimizers
get plain tensors of this rank. Adds up what no backward pass does: gradients that tensor-parallel
ranks have in part, and those of an embedding that two stages have.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tokamake.parallel.axis import Axis, part
from tokamake.parallel.mesh import Mesh
from tokamake.parallel.tensor import Placement


@dataclass
class Held:
    """What this rank has of a parameter."""

    name: str
    """Name in its stage."""
    saved_name: str
    """Hugging Face's name of it, or of what it is a copy of."""
    parameter: nn.Parameter
    """The module's, a DTensor where FSDP2 shards it."""
    local: nn.Parameter
    """This rank's part, for the optimizer; shares its memory with `parameter`, or is the fp32
    original of which that is a rounded copy."""
    placement: Placement
    """How tensor-parallel ranks hold it."""
    shape: torch.Size
    """Of the whole parameter."""
    place: tuple[slice, ...]
    """Index of this rank's part in the whole parameter."""
    groups: tuple[dist.ProcessGroup, ...]
    """Groups over which the whole is cut: sums over these are sums over all parts."""
    is_copy: bool
    """Whether it is the output layer's copy of an embedding in another stage."""
    counts: bool
    """Whether this rank's part counts in sums over all ranks: of copies, one does."""

    def take_gradient(self) -> None:
        """Let `local` have the gradient of `parameter`; in higher precision, add to what it has."""
        gradient = self.parameter.grad
        if self.parameter.dtype == self.local.dtype or isinstance(gradient, DTensor):
            self.local.grad = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        elif gradient is not None:
            wide = gradient.to(self.local.dtype)
            self.local.grad = wide if self.local.grad is None else self.local.grad.add_(wide)
            self.parameter.grad = None


def shard(
    module: nn.Module,
    blocks: Iterable[nn.Module],
    mesh: Mesh,
    *,
    policy: MixedPrecisionPolicy,
    reshard_after_forward: bool,
) -> None:
    """Shard a module's parameters over the mesh with FSDP2, each block for itself."""
    for block in (*blocks, module):
        fully_shard(
            block, mesh=mesh.shards, mp_policy=policy, reshard_after_forward=reshard_after_forward
        )


def _rows_of(parameter: Tensor) -> slice:
    """Rows of a parameter, as tensor parallelism has cut it, that this rank's shard has."""
    if not isinstance(parameter, DTensor):
        return slice(None)
    mesh = parameter.device_mesh
    dim = mesh.ndim - 1
    rows = part(parameter.shape[0], Axis(mesh.get_local_rank(dim), mesh.size(dim)))
    return slice(rows.start, rows.stop)


def held_by(
    model: nn.Module,
    placed: dict[str, Placement],
    mesh: Mesh,
    *,
    shapes: Mapping[str, tuple[int, ...]],
    saved_names: Mapping[str, str],
    copy: str | None,
) -> list[Held]:
    """What this rank has of each parameter of a stage.

    Args:
        model: the stage, sharded or not.
        placed: its placements.
        mesh: this rank among its peers.
        shapes: of the whole parameters, by their saved names.
        saved_names: by names of parameters.
        copy: name of the output layer where it is a copy of an embedding in another stage.
    """
    found = []
    for name, parameter in model.named_parameters():
        tensor: Tensor = parameter
        local, replica = parameter, 0
        if isinstance(tensor, DTensor):
            local, replica = nn.Parameter(tensor.to_local()), _replica(tensor)
        first = mesh.tensor.rank == 0 or placed[name].dim is not None
        shape = torch.Size(shapes[saved_names[name]])
        found.append(
            Held(
                name,
                saved_names[name],
                parameter,
                local,
                placed[name],
                shape=shape,
                place=_place(parameter, shape, placed[name], mesh),
                groups=_groups(parameter, placed[name], mesh),
                is_copy=name == copy,
                counts=first and not replica and name != copy,
            )
        )
    return found


def _place(
    parameter: Tensor, shape: torch.Size, placement: Placement, mesh: Mesh
) -> tuple[slice, ...]:
    found = [range(size) for size in shape]
    if placement.dim is not None:
        found[placement.dim] = part(shape[placement.dim], mesh.tensor)
    found[0] = found[0][_rows_of(parameter)]
    return tuple(slice(rows.start, rows.stop) for rows in found)


def _groups(parameter: Tensor, placement: Placement, mesh: Mesh) -> tuple[dist.ProcessGroup, ...]:
    groups = []
    if placement.dim is not None and mesh.tensor.group is not None:
        groups.append(mesh.tensor.group)
    if isinstance(parameter, DTensor) and parameter.device_mesh.size(-1) > 1:
        groups.append(parameter.device_mesh.get_group(-1))
    return tuple(groups)


def _replica(parameter: DTensor) -> int:
    mesh = parameter.device_mesh
    return mesh.get_local_rank(0) if mesh.ndim > 1 else 0


def _gradient(held: Held) -> Tensor | None:
    return held.local.grad


@torch.no_grad()
def keep_originals(held: Iterable[Held], dtype: torch.dtype) -> None:
    """Let parameters become rounded copies of what the optimizer has."""
    for one in held:
        one.local = nn.Parameter(one.parameter.detach())
        one.parameter.data = one.local.to(dtype)


@torch.no_grad()
def round_originals(held: Iterable[Held]) -> None:
    """Bring what the optimizer has changed into parameters that are rounded copies."""
    pairs = [(one.parameter, one.local) for one in held if one.parameter.dtype != one.local.dtype]
    if pairs:
        parameters, locals_ = zip(*pairs, strict=True)
        torch._foreach_copy_([*parameters], [*locals_])


def add_up_partial(
    shards: Iterable[Held], axis: Axis, gradient: Callable[[Held], Tensor | None] = _gradient
) -> None:
    """Sum gradients of which each tensor-parallel rank has a part; done at once for all.

    Args:
        shards: what this rank has.
        axis: the tensor-parallel ranks.
        gradient: where the gradients are.
    """
    if axis.size == 1:
        return
    found = [gradient(one) for one in shards if one.placement.partial]
    _all_reduce([each for each in found if each is not None], axis.group)


def _all_reduce(tensors: list[Tensor], group: dist.ProcessGroup | None) -> None:
    if not tensors:
        return
    flat = _flatten_dense_tensors(tensors)
    dist.all_reduce(flat, group=group)
    for tensor, total in zip(tensors, _unflatten_dense_tensors(flat, tensors), strict=True):
        tensor.copy_(total)


def add_up_copies(
    held: Iterable[Held],
    axis: Axis,
    name: str,
    gradient: Callable[[Held], Tensor | None] = _gradient,
) -> None:
    """Sum the gradients of an embedding and of its copy in the last stage; both get the sum.

    Args:
        held: what this rank has.
        axis: the pipeline ranks.
        name: of the embedding.
        gradient: where the gradients are.
    """
    both = [gradient(one) for one in held if one.is_copy or one.name == name]
    gradients = [each for each in both if each is not None]
    if axis.size == 1 or not gradients:
        return
    if len(gradients) == 2:
        gradients[0].add_(gradients[1])
        gradients[1].copy_(gradients[0])
        return
    (own,) = gradients
    assert axis.group is not None
    other = axis.size - 1 if axis.rank == 0 else 0
    peer, theirs = dist.get_global_rank(axis.group, other), torch.empty_like(own)
    operations = [
        dist.P2POp(dist.isend, own.contiguous(), peer, axis.group),
        dist.P2POp(dist.irecv, theirs, peer, axis.group),
    ]
    for request in dist.batch_isend_irecv(operations):
        request.wait()
    own.add_(theirs)


def squares(held: Iterable[Held], device: torch.device) -> Tensor:
    """Sum of squares, fp32, of this rank's gradients; of copies on several ranks, one counts."""
    counted = [one.local.grad for one in held if one.counts and one.local.grad is not None]
    norms = torch._foreach_norm(counted, dtype=torch.float32) if counted else ()
    return torch.stack([*norms]).square().sum() if norms else torch.zeros((), device=device)


def scale(held: Iterable[Held], factor: float) -> None:
    """Multiply this rank's gradients."""
    if factor != 1:
        torch._foreach_mul_([one.local.grad for one in held if one.local.grad is not None], factor)
