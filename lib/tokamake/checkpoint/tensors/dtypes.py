"""Dtypes of tensors in files: their width, and their name in each kind of file.

Copying bytes needs no more than that, so torch is imported only where numbers are computed.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Dtype:
    """A dtype of tensors."""

    name: str
    """torch's name."""
    itemsize: int
    """Bytes of an element."""
    in_safetensors: str | None = None
    """safetensors' name; None if safetensors lacks it."""
    storage: str | None = None
    """Name of the storage class in torch.save's files; None if there is no such class."""
    short: str | None = None
    """Name in options and messages, if tokamake stores weights in it."""

    def __str__(self) -> str:
        """Return e.g. torch.float32."""
        return f"torch.{self.name}"

    def __setstate__(self, _: Any) -> None:
        """Refuse: a pickle that names a dtype could otherwise change it for the whole process."""
        raise TypeError("a dtype cannot be changed")

    @property
    def torch(self) -> "torch.dtype":
        import torch

        dtype: torch.dtype = getattr(torch, self.name)
        return dtype


FLOAT32 = Dtype("float32", 4, "F32", "FloatStorage", "fp32")

ALL = (
    Dtype("complex128", 16, None, "ComplexDoubleStorage"),
    Dtype("complex64", 8, None, "ComplexFloatStorage"),
    Dtype("float64", 8, "F64", "DoubleStorage"),
    FLOAT32,
    Dtype("bfloat16", 2, "BF16", "BFloat16Storage", "bf16"),
    Dtype("float16", 2, "F16", "HalfStorage", "fp16"),
    Dtype("float8_e5m2", 1, "F8_E5M2"),
    Dtype("float8_e4m3fn", 1, "F8_E4M3"),
    Dtype("int64", 8, "I64", "LongStorage"),
    Dtype("int32", 4, "I32", "IntStorage"),
    Dtype("int16", 2, "I16", "ShortStorage"),
    Dtype("int8", 1, "I8", "CharStorage"),
    Dtype("uint8", 1, "U8", "ByteStorage"),
    Dtype("bool", 1, "BOOL", "BoolStorage"),
    Dtype("uint64", 8),
    Dtype("uint32", 4),
    Dtype("uint16", 2),
)
"""All dtypes, in the order in which safetensors writes tensors."""

OF_WEIGHTS = {dtype.short: dtype for dtype in ALL if dtype.short}
"""Dtypes of weights, by their name in options."""

_BY_NAME = {dtype.name: dtype for dtype in ALL}


def named(name: str) -> Dtype | None:
    """Return the dtype with this name in torch, or None."""
    return _BY_NAME.get(name)


def of(dtype: "torch.dtype") -> Dtype:
    return _BY_NAME[str(dtype).removeprefix("torch.")]


def widest(dtypes: Iterable[Dtype]) -> Dtype:
    """Return the dtype that torch promotes all of these to."""
    first, *rest = dict.fromkeys(dtypes)
    if not rest:
        return first
    import functools

    import torch

    return of(functools.reduce(torch.promote_types, (dtype.torch for dtype in (first, *rest))))
