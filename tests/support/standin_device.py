"""A stand-in accelerator: a device of torch that is no CPU, with memory and kernels of the CPU.

Its tensors have torch's dispatch key PrivateUse1, and storages on memory of the host. Each operator
checks its devices, as CUDA does, counts what costs time on an accelerator, and calls the CPU's
kernel on the same memory: numbers are the CPU's. It has no streams, no kernels of its own, and no
memory that can run out.

torch keeps the device for the rest of the process: call `install` in a process of its own
(`tests.support.ranks.spawn`). Checked with torch 2.13.
"""

import os
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.library import Library
from torch.nn import functional as F
from torch.nn.attention import varlen
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tests.support.standin_costs import allocate, asked, copy, free, launch, live_bytes, wait
from tokamake.runtime.device_types import DEVICE_TYPES, DeviceType, has_grouped_mm

NAME = "standin"
_aten = torch.ops.aten
_CPU_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_ON_METADATA = {"view", "as_strided", "_reshape_alias", "unfold", "view_as_real", "set_"}
"""Operators that read no elements."""
_OF_VALUES = {
    *("nonzero", "masked_select", "bincount", "equal", "_local_scalar_dense"),
    *("_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"),
}
"""Operators whose result, or its shape, the host needs: CUDA waits."""
_INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
"""Operators that take indices from the host, too; CUDA copies them, and waits."""
_REFUSES_SCALARS = {"cat", "stack", "index_select", "gather", "scatter", "scatter_add", "mm", "bmm"}
"""Operators that refuse scalars of the host, too."""


# ---- Tensors of the device, on memory of the host ----


class _Memory:
    """Keeps the memory of a storage alive, and counts it."""

    def __init__(self, host: torch.UntypedStorage) -> None:
        self.host, self._size = host, host.nbytes()
        allocate(self._size)

    def __del__(self) -> None:
        free(self._size)


def on_device(host: Tensor) -> Tensor:
    """A tensor of the stand-in on the memory of a tensor of the host."""
    memory, device = host.untyped_storage(), torch.device(NAME, 0)
    storage: Any = torch._C._construct_storage_from_data_pointer(
        memory.data_ptr(), device, memory.nbytes()
    )
    storage.memory = _Memory(memory)
    return _placed(_bare(host.dtype), storage, host)


def on_host(tensor: Tensor) -> Tensor:
    """A tensor of the host on the memory of a tensor of the stand-in."""
    storage: Any = tensor.untyped_storage()
    place = tensor.storage_offset(), tensor.shape, tensor.stride()
    return torch.empty(0, dtype=tensor.dtype).set_(storage.memory.host, *place)


def _bare(dtype: torch.dtype) -> Tensor:
    empty: Tensor = torch._C._acc.create_empty_tensor((0,), dtype)
    return empty


def _placed(tensor: Tensor, storage: Any, like: Tensor) -> Tensor:
    place = like.storage_offset(), like.shape, like.stride()
    set_ = _aten.set_.source_Storage_storage_offset
    placed: Tensor = set_.redispatch(_CPU_KEY, tensor, storage, *place)
    return placed


def _is_here(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == NAME


# ---- Kernels ----


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Any operator: the CPU's kernel on the same memory."""
    name = op._schema.name.rpartition("::")[2]
    if name in _ON_METADATA:
        return op.redispatch(_CPU_KEY, *args, **kwargs)
    pairs: list[tuple[Tensor, Tensor]] = []

    def lowered(value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if not isinstance(value, Tensor):
            return value
        if not _is_here(value):
            _check_place(name, value)
            return value
        pairs.append((on_host(value), value))
        return pairs[-1][0]

    on_cpu, named = tree_map(lowered, (args, kwargs))
    _count(name, args, has_size=kwargs.get("output_size") is not None)
    # A number in place of a tensor: another overload may take it.
    has_number = name.startswith("bitwise_") and not all(isinstance(x, Tensor) for x in args)
    result = (op.overloadpacket if has_number else op)(*on_cpu, **named)

    def raised(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        memory = value.untyped_storage().data_ptr()
        for host, own in pairs:
            if value is host:
                return _resized(own, host)
            if memory and memory == host.untyped_storage().data_ptr():
                return _placed(_bare(value.dtype), own.untyped_storage(), value)
        return on_device(value)

    return tree_map(raised, result)


def _resized(tensor: Tensor, host: Tensor) -> Tensor:
    """The tensor that an operator wrote into, which may have another size now."""
    if tensor.shape == host.shape:
        return tensor
    return _placed(tensor, on_device(host).untyped_storage(), host)


def _check_place(name: str, value: Tensor) -> None:
    is_scalar = value.dim() == 0 and name not in _REFUSES_SCALARS
    if not is_scalar and name not in _INDEXED:
        raise RuntimeError(
            f"aten::{name}: expected all tensors to be on the same device, but found {NAME}:0 and "
            f"{value.device}"
        )


def _count(name: str, args: tuple[Any, ...], *, has_size: bool = False) -> None:
    # With the size of the result, CUDA need not wait for it.
    waits = name in _OF_VALUES or (name == "repeat_interleave" and len(args) == 1 and not has_size)
    if name in _INDEXED:
        indices = [each for each in args[1] if each is not None]
        are_bits = any(each.dtype in (torch.bool, torch.uint8) for each in indices)
        # A number at each bit is one kernel, `masked_fill`.
        fills = len(args) > 2 and args[2].numel() == 1
        waits = (are_bits and not fills) or not all(map(_is_here, indices))
    if waits:
        wait(name)
    if name != "_local_scalar_dense":
        launch(name)


def _empty(
    size: Any, dtype: Any = None, memory_format: Any = torch.contiguous_format, **_: Any
) -> Tensor:
    format_ = memory_format or torch.contiguous_format
    return on_device(torch.empty(size, dtype=dtype, memory_format=format_, device="cpu"))


def _empty_strided(size: Any, stride: Any, dtype: Any = None, **_: Any) -> Tensor:
    return on_device(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """`copy_`, also between host and device."""
    if _is_here(target) and _is_here(source):
        launch("copy_")
    else:
        host = source if _is_here(target) else target
        kind = "back" if host is target else "pinned" if host.is_pinned() else "unpinned"
        copy(kind)
        # The host may continue while the device reads, if nobody else needs the memory.
        if not (non_blocking and (host.is_pinned() or kind == "unpinned")):
            wait("copy back" if host is target else "copy to the device")
    to, of = (on_host(each) if _is_here(each) else each for each in (target, source))
    to.copy_(of)
    return target


def _pin_memory(tensor: Tensor, device: Any = None) -> Tensor:
    pinned = tensor.clone()
    storage: Any = pinned.untyped_storage()
    storage.is_pinned_here = True
    return pinned


def _is_pinned(tensor: Tensor, device: Any = None) -> bool:
    return hasattr(tensor.untyped_storage(), "is_pinned_here")


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """Scaled dot product attention by the operator that torch chooses for a CPU."""
    inputs, mask = (query, key, value), attn_mask
    with _disable_current_modes():  # of `counted`
        *hosts, host_mask = (_as_asked(each) for each in (*inputs, mask))
        chosen = torch._fused_sdp_choice(*hosts, host_mask, dropout_p, is_causal, **options)
    if chosen != torch.nn.attention.SDPBackend.FLASH_ATTENTION.value:
        plain = _aten._scaled_dot_product_attention_math
        result: Tensor = plain(*inputs, mask, dropout_p, is_causal, **options)[0]
        return result
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, -torch.inf)
    flash = _aten._scaled_dot_product_flash_attention_for_cpu
    options.pop("enable_gqa", None)
    return flash(*inputs, dropout_p, is_causal, attn_mask=mask, **options)[0]


def _as_asked(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    host = on_host(tensor.detach())
    return host.requires_grad_(tensor.requires_grad and torch.is_grad_enabled())


def _collective(op: Any, *args: Any, **kwargs: Any) -> Any:
    """A collective, by gloo on the same memory."""

    def lowered(value: Any) -> Any:
        return on_host(value) if _is_here(value) else value

    launch(op._schema.name)
    with _disable_current_modes():  # of `counted`: gloo splits tensors
        result = op(*tree_map(lowered, args), **tree_map(lowered, kwargs))
    # A result begins with the tensors that were passed.
    return (args[0], *result[1:]) if isinstance(result, tuple) else result


def _resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
    """FSDP2 frees gathered weights by this: they lose their values, and keep their memory."""
    if storage.device.type != NAME:
        return _resize_of_torch(storage, size)
    assert not size
    memory: Any = storage
    with _disable_current_modes():  # of `counted`
        torch.empty(0, dtype=torch.uint8).set_(memory.memory.host).fill_(255)  # NaN
    return storage


_resize_of_torch: Any = torch.UntypedStorage.resize_


# ---- The device in torch ----


class _Stream:
    """A stream, or an event of one: all work is done when the host has asked for it."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, _: Any = None) -> "_Stream":
        return self

    wait_event = record = record_event = wait = wait_stream

    def synchronize(self) -> None:
        wait("synchronize")


class _Module:
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
        pass

    # The kernels are the CPU's, and so is their generator.
    @staticmethod
    def get_rng_state(*_: Any) -> Tensor:
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state: Tensor, *_: Any) -> None:
        torch.set_rng_state(state)


# ---- The device in tokamake ----


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
        default_stream = staticmethod(_Module.current_stream)

    set_accelerator(Accelerator())
    return device


_libraries: list[Library] = []
"""torch forgets the kernels of a library that nobody keeps."""


@cache
def install() -> torch.device:
    """Make torch know the device, for the rest of this process."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    own: dict[str, Callable[..., Any]] = {
        "empty.memory_format": _empty,
        "empty_strided": _empty_strided,
        "copy_": _copy,
    }
    kernels = {f"aten::{name}": kernel for name, kernel in own.items()}
    for name in torch._C._dispatch_get_all_op_names():
        namespace = name.partition("::")[0]
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU")
        # CUDA, too, has a kernel for a list of tensors, or for all groups; otherwise torch would
        # run its parts.
        is_joint = "::_foreach_" in name or name == "aten::_grouped_mm"
        if namespace == "aten" and (has_kernel or is_joint):
            kernels.setdefault(name, partial(_run, _operator(name)))
        elif namespace == "c10d" and has_kernel:
            kernels[name] = partial(_collective, _operator(name))
    _register("_", {}).fallback(_run, "PrivateUse1")
    with warnings.catch_warnings(action="ignore"):  # torch has kernels of c10d for this key
        for namespace in ("aten", "c10d"):
            of_it = {name: each for name, each in kernels.items() if name.startswith(namespace)}
            _register(namespace, of_it)
    _register("aten", {"aten::scaled_dot_product_attention": _attention}, "AutogradPrivateUse1")
    _register("aten", {"aten::_pin_memory": _pin_memory, "aten::is_pinned": _is_pinned}, "CPU")
    torch.UntypedStorage.resize_ = _resize  # type: ignore[method-assign]
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
