"""The stand-in accelerator in use: tokamake trains on it, and DeepSpeed as a variant of its CPU."""

import os
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import varlen

from tests.support.standin_costs import asked
from tests.support.standin_device import Module, install
from tests.support.standin_kernels import NAME
from tokamake.runtime.device_types import DEVICE_TYPES, DeviceType, has_grouped_mm
from tokamake.train.hooks import stragglers


def _memory_bytes(_: torch.device) -> int:
    return 2**34


def _identity(_: torch.device) -> str:
    return f"{NAME} of process {os.getpid()}"


def _has_varlen(_: torch.device) -> bool:
    return True


DEVICE_TYPE = DeviceType(
    "gloo",
    memory_bytes=_memory_bytes,
    identity=_identity,
    has_varlen=_has_varlen,
    has_grouped_product=has_grouped_mm,
    compiles=False,
)
"""Entry of the table. Documents are a mask in one call, a kernel of CUDA elsewhere."""


@wraps(varlen.varlen_attn)
def _varlen_attn(
    q_THK: Tensor,
    k_TGK: Tensor,
    v_TGK: Tensor,
    bounds: Tensor,
    *_: Any,
    window_size: tuple[int, int],
    **__: Any,
) -> Tensor:
    """Flash attention of all documents in one call, as a mask: it waits for nothing."""
    places = torch.arange(len(q_THK), device=bounds.device)
    documents = torch.searchsorted(bounds, places, right=True)
    mask = documents[:, None] == documents
    ahead = places[:, None] - places
    for most, distance in zip(window_size, (ahead, -ahead), strict=True):
        if most >= 0:
            mask = mask & (distance <= most)
    q, k, v = (x.transpose(0, 1)[None] for x in (q_THK, k_TGK, v_TGK))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return y[0].transpose(0, 1)


def _recorded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def ask(*args: Any, **kwargs: Any) -> Any:
        asked(name)
        return function(*args, **kwargs)

    return ask


def use() -> torch.device:
    """Let tokamake find the device and train on it, also in the default process group."""
    device = install()
    if NAME not in DEVICE_TYPES:
        entries = DEVICE_TYPE._asdict().items()
        DEVICE_TYPES[NAME] = DeviceType(
            **{name: _recorded(name, of) if callable(of) else of for name, of in entries}
        )
        varlen.varlen_attn = _varlen_attn
        stragglers._SIZE = 64  # the CPU takes long for a product of the size for a GPU
        dist.Backend.backend_capability["gloo"].append(NAME)
        dist.Backend.default_device_backend_map[NAME] = "gloo"
        group = dist.group.WORLD
        if group is not None:
            gloo = group._get_backend(torch.device("cpu"))
            group._register_backend(device, dist.ProcessGroup.BackendType.GLOO, gloo)
    return device


def use_with_deepspeed() -> torch.device:
    """Let DeepSpeed use the device, too, as a variant of its CPU."""
    device = use()
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.accelerator import set_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    class Accelerator(CPU_Accelerator):
        device_name = staticmethod(lambda index=None: NAME if index is None else f"{NAME}:{index}")
        current_device_name = staticmethod(lambda: f"{NAME}:0")
        device = staticmethod(lambda *_: device)
        default_stream = staticmethod(Module.current_stream)

    set_accelerator(Accelerator())
    return device
