"""Version of torch and the devices and back ends that it supports, as plain values."""

import os
import shutil
from pathlib import Path
from typing import Any


def torch_facts() -> dict[str, Any]:
    """Import torch and query it.

    Returns:
        torch: version. device: cpu, cuda or xpu, as the trainer chooses. devices: number of
        devices, 0 for a CPU. name: name of the first device. backends: available back ends of
        torch.distributed. bf16: whether the device supports it. seen: accelerator detected without
        torch, or empty.
    """
    import torch
    import torch.distributed as dist

    kinds = (kind for kind in ("cuda", "xpu") if _available(torch, kind))
    kind = next(kinds, "cpu")
    module = getattr(torch, kind)
    return {
        "torch": str(torch.__version__),
        "device": kind,
        "devices": module.device_count() if kind != "cpu" else 0,
        "name": module.get_device_name(0) if kind != "cpu" else "",
        "backends": [name for name in ("gloo", "nccl", "xccl", "mpi") if _has_backend(dist, name)],
        "bf16": bool(module.is_bf16_supported()) if kind != "cpu" else True,
        "seen": _accelerator(),
    }


def _available(torch: Any, kind: str) -> bool:
    module = getattr(torch, kind, None)
    return module is not None and bool(module.is_available())


def _has_backend(dist: Any, backend: str) -> bool:
    available = getattr(dist, f"is_{backend}_available", None)
    return available is not None and bool(available())


def _accelerator() -> str:
    if Path("/dev/nvidia0").exists() and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        return "an NVIDIA GPU"
    return "an Intel GPU" if shutil.which("xpu-smi") and Path("/dev/dri").exists() else ""
