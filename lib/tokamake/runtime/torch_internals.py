"""The only place that touches private names of torch. Checked with torch 2.13.

tests/runtime/test_torch_internals.py has a test for each name, so that a version of torch that
changes one fails there by name. Imports of torch's distributed packages, which take seconds, are in
the functions.
"""

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn import functional as F

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Operations on lists of tensors, with one kernel for many tensors; torch.optim calls them.
foreach_add_ = torch._foreach_add_
foreach_addcmul_ = torch._foreach_addcmul_
foreach_clamp_max_ = torch._foreach_clamp_max_
foreach_clamp_min_ = torch._foreach_clamp_min_
foreach_copy_ = torch._foreach_copy_
foreach_div = torch._foreach_div
foreach_div_ = torch._foreach_div_
foreach_lerp = torch._foreach_lerp
foreach_lerp_ = torch._foreach_lerp_
foreach_mul = torch._foreach_mul
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_sign_ = torch._foreach_sign_
foreach_sqrt = torch._foreach_sqrt

not_compiled = _disable_dynamo
"""Decorator of functions that torch's compiler leaves as they are. The public one,
`torch.compiler.disable`, imports the compiler at once, which takes long."""

flatten = _flatten_dense_tensors
"""Concatenate tensors of one dtype to a flat tensor."""
unflatten = _unflatten_dense_tensors
"""Views of a flat tensor in the shapes of given tensors."""

# Fused attention that also returns the log-sum-exp of the scores; public functions drop it.
_aten = torch.ops.aten
cpu_flash_attention = _aten._scaled_dot_product_flash_attention_for_cpu
cpu_flash_attention_backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward
flash_attention = _aten._scaled_dot_product_flash_attention
flash_attention_backward = _aten._scaled_dot_product_flash_attention_backward
efficient_attention = _aten._scaled_dot_product_efficient_attention
efficient_attention_backward = _aten._scaled_dot_product_efficient_attention_backward

grouped_product: Any = getattr(_aten, "_grouped_mm", None)
"""Operator of `torch.nn.functional.grouped_mm`; None: this version of torch lacks it."""
onednn_linear: Any = (
    getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if torch.backends.mkl.is_available()
    else None
)
"""oneDNN's product of states (..., D) and a weight (E, D), which torch's compiler calls; None if
torch does not use MKL."""
_LINEAR = F.linear


def restore_linear() -> None:
    """Undo the replacement of `torch.nn.functional.linear`, which outlives an engine of DeepSpeed.

    DeepSpeed's function, for ZeRO 3, adds the bias to the product in place. An engine with
    selective recomputation in the same process would add it twice: recomputation saves products.
    """
    F.linear = _LINEAR


def varlen_attention() -> Any:
    """The operator that `torch.nn.attention.varlen.varlen_attn` calls; None in older versions."""
    from torch.nn.attention import varlen  # noqa: F401 - registers it; the import takes long

    return getattr(torch.ops.torch_attn, "_varlen_attn", None)


@cache
def attention_operators() -> tuple[Any, ...]:
    """Overloads of all operators that fused attention dispatches to."""
    varlen = varlen_attention()
    return (
        flash_attention.default,
        efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        cpu_flash_attention.default,
        _aten._scaled_dot_product_fused_attention_overrideable.default,
        *([varlen.default] if varlen else []),
    )


def wrapper_subclass(cls: type, shape: Sequence[int], *, dtype: torch.dtype) -> Any:
    """Create a tensor of a subclass that has a shape and a dtype but no data of its own."""
    return Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype)


def mesh_without_groups(device: str, ranks: Tensor, *, names: Sequence[str]) -> "DeviceMesh":
    """Mesh of ranks for the layout of DTensors, which makes no process groups."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh(
        device, ranks, mesh_dim_names=(*names,), _init_backend=False, _rank=dist.get_rank()
    )


def local_shape_and_offset(
    shape: Sequence[int], mesh: Any, *, placements: Sequence[Any]
) -> tuple[Sequence[int], Sequence[int]]:
    """Shape of this rank's shard of a DTensor, and its offset in the whole tensor."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return compute_local_shape_and_global_offset(torch.Size(shape), mesh, placements)


def storage_info(*, file: str, offset: int, length: int) -> Any:
    """Record of the distributed checkpoint (DCP) of where a chunk is, in bytes of a file."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, offset, length)


def narrowed(tensor: Tensor, offsets: Sequence[int], *, sizes: Sequence[int]) -> Tensor:
    """View of a slice of a tensor along each dimension."""
    from torch.distributed._shard._utils import narrow_tensor_by_index

    return narrow_tensor_by_index(tensor, offsets, sizes)


def set_group_timeouts(seconds: float) -> None:
    """Set the time-out of all process groups of this rank: the default one and all subgroups."""
    from datetime import timedelta

    from torch.distributed import distributed_c10d

    for group in list(distributed_c10d._world.pg_map):
        for device in group._device_types:
            backend = group._get_backend(device)
            if hasattr(backend, "_set_default_timeout"):  # the back end of XPUs may have none
                backend._set_default_timeout(timedelta(seconds=seconds))


def group_timeout(group: Any) -> Any:
    """Time-out of a process group, a timedelta; None if its back end has none."""
    (device, *_) = group._device_types
    options = getattr(group._get_backend(device), "options", None)
    return getattr(options, "_timeout", None)
