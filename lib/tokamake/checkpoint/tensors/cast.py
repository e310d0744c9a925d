"""Changes number formats as torch does, bit by bit, without importing it where numpy has them.

Only what a NaN's bits are differs: torch writes other ones on other processors, here they are kept
as far as they fit.
"""

from typing import Any

import numpy as np

from tokamake.checkpoint.tensors.dtypes import FLOAT32, Dtype

Array = np.ndarray[Any, Any]

_FLOATS = {"float64": "<f8", "float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}
"""What numpy is to see the bits of a format as."""
_INFINITY = {
    "float64": 0x7FF0 << 48,
    "float32": 0x7F80 << 16,
    "float16": 0x7C00,
    "bfloat16": 0x7F80,
}
"""Its bits, as an integer; those of NaN are larger, but for the sign."""


def converted(raw: Array, source: Dtype, target: Dtype) -> Array:
    """Elements in another number format, rounded to the nearest, halves to even.

    Args:
        raw: bytes of the elements, contiguous, of a type as wide as the source's format.
        source: format that they are in.
        target: format to change to; from fp64 to fp16 or bf16 it goes by way of fp32, as in torch.

    Returns:
        Bytes of the elements, of the same shape.
    """
    if source == target:
        return raw
    if source.name in _FLOATS and target.name in _FLOATS:
        with np.errstate(all="ignore"):
            return _rounded(values(raw, source), target).view(f"V{target.itemsize}")
    import torch

    flat = torch.from_numpy(raw.reshape(-1).view("u1")).view(source.torch)
    changed = flat.to(target.torch)
    found: Array = changed.view(torch.uint8).numpy().view(f"V{target.itemsize}")
    return found.reshape(raw.shape)


def values(raw: Array, dtype: Dtype) -> Array:
    """Numbers as numpy has them: of fp64, fp32 and fp16 as they are, of all others in fp32."""
    if dtype.name not in _FLOATS:
        return converted(raw, dtype, FLOAT32).view("<f4")
    found = raw.view(_FLOATS[dtype.name])
    if dtype.name != "bfloat16":
        return found
    wide = found.astype("<u4")
    wide <<= np.uint32(16)
    return wide.view("<f4")


def _rounded(found: Array, target: Dtype) -> Array:
    if target.itemsize > 2:
        return found.astype(_FLOATS[target.name])
    single = found.astype("<f4", copy=False)
    return single.astype("<f2") if target.name == "float16" else _bfloat16(single)


def _bfloat16(single: Array) -> Array:
    """Upper halves of fp32, rounded."""
    bits = single.view("<u4")
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits  # wraps around for NaN alone, which is mended
    rounded >>= np.uint32(16)
    found: Array = rounded.astype("<u2")
    if (odd := np.isnan(single)).any():
        found[odd] = (bits[odd] >> np.uint32(16)) | np.uint32(0x40)
    return found


def all_finite(raw: Array, dtype: Dtype) -> bool:
    """Whether no element is NaN or infinite; formats other than fp64, fp32, fp16 and bf16 pass."""
    if dtype.name not in _INFINITY or not raw.size:
        return True
    infinity, sign = _INFINITY[dtype.name], 1 << (8 * dtype.itemsize - 1)
    # Of signed integers the largest are the positive numbers, of unsigned ones the negative.
    signed, unsigned = (int(raw.view(f"<{each}{dtype.itemsize}").max()) for each in "iu")
    return signed < infinity and unsigned < infinity | sign


def num_not_finite(raw: Array, dtype: Dtype) -> int:
    """How many elements are NaN or infinite; see `all_finite`."""
    if all_finite(raw, dtype):
        return 0
    return int(np.count_nonzero(~np.isfinite(values(raw, dtype))))
