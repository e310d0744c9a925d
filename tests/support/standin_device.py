"""A stand-in accelerator: a device of torch that is no CPU, with memory and kernels of the CPU.

Its tensors have torch's dispatch key PrivateUse1, and storages on memory of the host. Each operator
checks its devices, as CUDA does, counts what costs time on an accelerator, and calls the CPU's
kernel on the same memory: numbers are the CPU's. It has a random generator of its own. It has no
streams, no kernels of its own, and no memory that can run out.

torch keeps the device for the rest of the process: call `install` in a process of its own
(`tests.support.ranks.spawn`). Checked with torch 2.13.
"""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.library import Library
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tests.support import standin_kernels as kernels
from tests.support.standin_costs import live_bytes, wait
from tests.support.standin_kernels import NAME


class _Stream:
    """A stream, or an event of one: all work is done when the host has asked for it."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, _: Any = None) -> "_Stream":
        return self

    wait_event = record = record_event = wait = wait_stream

    def synchronize(self) -> None:
        wait("synchronize")


class Module:
    """torch.standin: what torch asks of the module of a device."""

    Stream = Event = _Stream

    @staticmethod
    def current_stream(*_: Any) -> _Stream:
        return _Stream()

    @staticmethod
    def stream(stream: Any) -> Any:
        return nullcontext(stream)

    @staticmethod
    def synchronize(*_: Any) -> None:
        wait("synchronize")

    @staticmethod
    def is_available() -> bool:
        return True

    is_initialized = is_available

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def get_device_name(*_: Any) -> str:
        return NAME

    @staticmethod
    def max_memory_allocated(*_: Any) -> int:
        return live_bytes()

    @staticmethod
    def set_device(device: Any) -> None:
        pass

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        kernels.generator.manual_seed(seed)

    @staticmethod
    def get_rng_state(*_: Any) -> Tensor:
        return kernels.generator.get_state()

    @staticmethod
    def set_rng_state(state: Tensor, *_: Any) -> None:
        kernels.generator.set_state(state)


_libraries: list[Library] = []
"""torch forgets the kernels of a library that nobody keeps."""


@cache
def install() -> torch.device:
    """Make torch know the device, for the rest of this process."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=Module())
    own: dict[str, Callable[..., Any]] = {
        "empty.memory_format": kernels.empty,
        "empty_strided": kernels.empty_strided,
        "copy_": kernels.copy_between,
    }
    all_kernels = {f"aten::{name}": kernel for name, kernel in own.items()}
    for name in torch._C._dispatch_get_all_op_names():
        namespace = name.partition("::")[0]
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU")
        # CUDA, too, has a kernel for a list of tensors, or for all groups; otherwise torch would
        # run its parts.
        is_joint = "::_foreach_" in name or name == "aten::_grouped_mm"
        if namespace == "aten" and (has_kernel or is_joint):
            all_kernels.setdefault(name, partial(kernels.run, _operator(name)))
        elif namespace == "c10d" and has_kernel:
            all_kernels[name] = partial(kernels.collective, _operator(name))
    _register("_", {}).fallback(kernels.run, "PrivateUse1")
    with warnings.catch_warnings(action="ignore"):  # torch has kernels of c10d for this key
        for namespace in ("aten", "c10d"):
            of_it = {name: each for name, each in all_kernels.items() if name.startswith(namespace)}
            _register(namespace, of_it)
    attention = {"aten::scaled_dot_product_attention": kernels.attention}
    _register("aten", attention, "AutogradPrivateUse1")
    pinning = {"aten::_pin_memory": kernels.pin_memory, "aten::is_pinned": kernels.is_pinned}
    _register("aten", pinning, "CPU")
    torch.UntypedStorage.resize_ = kernels.resize  # type: ignore[method-assign]
    torch.accelerator.synchronize = lambda *_: wait("synchronize")  # type: ignore[assignment]
    return torch.device(NAME, 0)


def _register(
    namespace: str, kernels: dict[str, Callable[..., Any]], key: str = "PrivateUse1"
) -> Library:
    library = Library(namespace, "IMPL")
    _libraries.append(library)
    for name, kernel in kernels.items():
        library.impl(name.partition("::")[2], kernel, key)
    return library


def _operator(name: str) -> Any:
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")
