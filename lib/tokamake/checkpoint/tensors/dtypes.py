"""Number formats of tensors in files: what each kind of file calls them, and how wide they are.

Moving bytes needs no more, so that torch is imported only where numbers count.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Dtype:
    """A number format."""

    name: str
    """As torch calls it."""
    itemsize: int
    """Bytes."""
    in_safetensors: str | None = None
    """As safetensors calls it, which has not all of them."""
    storage: str | None = None
    """As torch.save calls it, for those that it has a name for."""
    short: str | None = None
    """As options and messages call it, if weights are kept in it."""

    def __str__(self) -> str:
        """As torch shows it."""
        return f"torch.{self.name}"

    def __setstate__(self, _: Any) -> None:
        """Refuse: a pickle can name a format, and would change it for all."""
        raise TypeError("a number format does not change")

    @property
    def torch(self) -> "torch.dtype":
        """torch's own."""
        import torch

        found: torch.dtype = getattr(torch, self.name)
        return found


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
"""In the order in which safetensors writes tensors of several."""

OF_WEIGHTS = {dtype.short: dtype for dtype in ALL if dtype.short}
"""Those that weights are kept in, by what options call them."""

_BY_NAME = {dtype.name: dtype for dtype in ALL}


def named(name: str) -> Dtype | None:
    """The format that torch calls so, if it is known."""
    return _BY_NAME.get(name)


def of(dtype: "torch.dtype") -> Dtype:
    """The format that is torch's."""
    return _BY_NAME[str(dtype).removeprefix("torch.")]


def widest(dtypes: Iterable[Dtype]) -> Dtype:
    """A format that holds all numbers of all of these."""
    first, *others = dict.fromkeys(dtypes)
    if not others:
        return first
    import functools

    import torch

    return of(functools.reduce(torch.promote_types, (dtype.torch for dtype in (first, *others))))
