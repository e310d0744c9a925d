"""The table of device types: what tokamake does differently on CUDA, on XPU and on CPUs.

Code that chooses by the type of an accelerator reads it here, and nowhere else; an entry that a
type lacks has its default. Elsewhere, a type is only compared with "cpu", and all accelerators are
alike. Nothing here imports torch before it is used.
"""

import inspect
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch


def _lacks(*_: Any, **__: Any) -> bool:
    return False


class DeviceType(NamedTuple):
    """Facts and kernels of a type of device."""

    backend: str
    """Back end of torch.distributed."""
    memory_bytes: "Callable[[torch.device], int] | None" = None
    """Memory of a device; None: the memory of the host counts."""
    identity: "Callable[[torch.device], str] | None" = None
    """Identity of a device within its host. None: devices are not compared. It is not the index:
    launchers may show each rank one device, with index 0. XPU tiles have no UUID."""
    has_varlen: "Callable[[torch.device], bool]" = _lacks
    """Whether a device has torch's flash attention of documents, in 16 bits; then attention holds
    no masks."""
    has_grouped_product: Callable[[], bool] = _lacks
    """Whether torch computes the products of all groups in one kernel, in bf16."""
    allows_attention: Callable[..., bool] = _lacks
    """Whether torch's fused attention, with the log-sum-exp of its scores, serves tensors: name of
    torch's check, (queries, keys, values), causal, grouped."""
    compiles: bool = True
    """Whether losses of compiled runs, and updates of optimizers that can do so, are compiled."""


def _cuda_memory(device: "torch.device") -> int:
    import torch

    return torch.cuda.mem_get_info(device)[1]


def _xpu_memory(device: "torch.device") -> int:
    import torch

    return torch.xpu.get_device_properties(device).total_memory


def _cuda_uuid(device: "torch.device") -> str:
    import torch

    return str(torch.cuda.get_device_properties(device).uuid)


@cache
def _cuda_has_varlen(device: "torch.device") -> bool:
    """NVIDIA from Ampere on; AMD is not tested. torch 2.9 has the function with other arguments."""
    import torch

    if torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    return "window_size" in varlen_arguments()


@cache
def varlen_arguments() -> frozenset[str]:
    """Arguments of torch's flash attention of documents."""
    from torch.nn.attention import varlen  # not above: the import takes long

    return frozenset(inspect.signature(varlen.varlen_attn).parameters)


@cache
def has_grouped_mm() -> bool:
    """Whether this torch is new enough, and not AMD's, which is not tested.

    On GPUs without a kernel, torch's function itself waits, and loops over the groups.
    """
    import torch

    return hasattr(torch.nn.functional, "grouped_mm") and torch.version.hip is None


def _cuda_allows_attention(check: str, tensors: Any, *, causal: bool, grouped: bool) -> bool:
    from torch.backends import cuda

    parameters: Any = cuda.SDPAParams
    allowed: bool = getattr(cuda, check)(parameters(*tensors, None, 0.0, causal, grouped))
    return allowed


DEVICE_TYPES = {
    "cpu": DeviceType("gloo", compiles=False),
    "cuda": DeviceType(
        "nccl",
        memory_bytes=_cuda_memory,
        identity=_cuda_uuid,
        has_varlen=_cuda_has_varlen,
        has_grouped_product=has_grouped_mm,
        allows_attention=_cuda_allows_attention,
    ),
    "xpu": DeviceType("xccl", memory_bytes=_xpu_memory),
}
"""Types of devices by torch's names, in the order in which training looks for them."""
ASSUMED = "cuda"
"""Type of the accelerators that estimates count for, without one at hand."""


def device_type(device: "torch.device") -> DeviceType:
    """Entry of a device; a type that the table lacks has no kernel of its own."""
    return DEVICE_TYPES.get(device.type, DeviceType("gloo"))


def holds_no_masks(kind: str) -> bool:
    """Whether attention in 16 bits holds no masks on a type of device."""
    return DEVICE_TYPES[kind].has_varlen is not _lacks
