"""Kernels of the stand-in accelerator: they call the CPU's kernels on memory of the host."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tests.support.standin_costs import allocate, copy, free, launch, wait

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
generator = torch.Generator()
"""Random generator of the device. In Python, torch gives this device none."""


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


def mapped(function: Callable[[Any], Any], values: Any) -> Any:
    """`tree_map` of torch for lists, tuples and dicts alone, which is faster."""
    kind = type(values)
    if kind is tuple or kind is list:
        return kind([mapped(function, each) for each in values])
    if kind is dict:
        return {name: mapped(function, each) for name, each in values.items()}
    return function(values)


@cache
def _kind(op: Any) -> tuple[str, bool]:
    """Name of an operator, and whether it draws random numbers."""
    is_random = torch.Tag.nondeterministic_seeded in op.tags
    return op._schema.name.rpartition("::")[2], is_random


def run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Any operator: the CPU's kernel on the same memory."""
    name, is_random = _kind(op)
    if name in _ON_METADATA:
        return op.redispatch(_CPU_KEY, *args, **kwargs)
    pairs: list[tuple[Tensor, Tensor]] = []

    def lowered(value: Any) -> Any:
        if not isinstance(value, Tensor):
            if type(value) is torch.device:
                return torch.device("cpu")
            if type(value) is torch.Generator:
                raise RuntimeError(f"Expected a '{NAME}' device type for generator but found 'cpu'")
            return value
        if not _is_here(value):
            _check_place(name, value)
            return value
        pairs.append((on_host(value), value))
        return pairs[-1][0]

    on_cpu, named = mapped(lowered, args), mapped(lowered, kwargs)
    _count(name, args, has_size=kwargs.get("output_size") is not None)
    # A number in place of a tensor: another overload may take it.
    has_number = name.startswith("bitwise_") and not all(isinstance(x, Tensor) for x in args)
    with _own_generator() if is_random else nullcontext():
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

    return mapped(raised, result)


@contextmanager
def _own_generator() -> Iterator[None]:
    """Draw from the device's generator: the CPU's has its state meanwhile."""
    of_host = torch.get_rng_state()
    torch.set_rng_state(generator.get_state())
    try:
        yield
    finally:
        generator.set_state(torch.get_rng_state())
        torch.set_rng_state(of_host)


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


def empty(
    size: Any, dtype: Any = None, memory_format: Any = torch.contiguous_format, **_: Any
) -> Tensor:
    format_ = memory_format or torch.contiguous_format
    return on_device(torch.empty(size, dtype=dtype, memory_format=format_, device="cpu"))


def empty_strided(size: Any, stride: Any, dtype: Any = None, **_: Any) -> Tensor:
    return on_device(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))


def copy_between(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
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


def pin_memory(tensor: Tensor, device: Any = None) -> Tensor:
    pinned = tensor.clone()
    storage: Any = pinned.untyped_storage()
    storage.is_pinned_here = True
    return pinned


def is_pinned(tensor: Tensor, device: Any = None) -> bool:
    return hasattr(tensor.untyped_storage(), "is_pinned_here")


def attention(
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


def collective(op: Any, *args: Any, **kwargs: Any) -> Any:
    """A collective, by gloo on the same memory."""

    def lowered(value: Any) -> Any:
        return on_host(value) if _is_here(value) else value

    launch(op._schema.name)
    with _disable_current_modes():  # of `counted`: gloo splits tensors
        result = op(*mapped(lowered, args), **mapped(lowered, kwargs))
    # A result begins with the tensors that were passed.
    return (args[0], *result[1:]) if isinstance(result, tuple) else result


def resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
    """FSDP2 frees gathered weights by this: they lose their values, and keep their memory."""
    if storage.device.type != NAME:
        return _resize_of_torch(storage, size)
    assert not size
    memory: Any = storage
    with _disable_current_modes():  # of `counted`
        torch.empty(0, dtype=torch.uint8).set_(memory.memory.host).fill_(255)  # NaN
    return storage


_resize_of_torch: Any = torch.UntypedStorage.resize_
