"""Cast numbers as torch does, bit by bit, without importing torch where numpy has the dtype.

NaN is the exception: torch writes different bits on different processors. Here the bits are kept as
far as they fit.
"""

from typing import Any

import numpy as np

from tokamake.checkpoint.tensors.dtypes import FLOAT32, Dtype

Array = np.ndarray[Any, Any]

FLOATS = {"float64": "<f8", "float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}
"""numpy's type for the bits of a dtype; numpy has no bfloat16."""
_INFINITY = {
    "float64": 0x7FF0 << 48,
    "float32": 0x7F80 << 16,
    "float16": 0x7C00,
    "bfloat16": 0x7F80,
}
"""Bits of infinity as an integer. Bits of NaN are larger, apart from the sign."""


def converted(raw: Array, source: Dtype, *, target: Dtype) -> Array:
    """Cast elements, rounding ties to even; fp64 to 16 bit goes through fp32, as in torch.

    `raw`: contiguous bytes, in items of the source's width. The result has the same shape.
    """
    if source == target:
        return raw
    if source.name in FLOATS and target.name in FLOATS:
        with np.errstate(all="ignore"):
            return _rounded(values(raw, source), target).view(f"V{target.itemsize}")
    import torch

    flat = torch.from_numpy(raw.reshape(-1).view("u1")).view(source.torch)
    cast = flat.to(target.torch)
    content: Array = cast.view(torch.uint8).numpy().view(f"V{target.itemsize}")
    return content.reshape(raw.shape)


def values(raw: Array, dtype: Dtype) -> Array:
    """Return elements as numbers of numpy: fp64, fp32 and fp16 unchanged, other dtypes as fp32."""
    if dtype.name not in FLOATS:
        return converted(raw, dtype, target=FLOAT32).view("<f4")
    numbers = raw.view(FLOATS[dtype.name])
    if dtype.name != "bfloat16":
        return numbers
    bits = numbers.astype("<u4")
    bits <<= np.uint32(16)  # bf16 is the upper half of fp32
    return bits.view("<f4")


def _rounded(numbers: Array, target: Dtype) -> Array:
    if target.itemsize > 2:
        return numbers.astype(FLOATS[target.name])
    single = numbers.astype("<f4", copy=False)
    return single.astype("<f2") if target.name == "float16" else _to_bfloat16(single)


def _to_bfloat16(single: Array) -> Array:
    """Round fp32 to its upper half."""
    bits = single.view("<u4")
    # Add half of the last kept bit, minus one if that bit is 0: ties round to even.
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits  # overflows for NaN only, which is set below
    rounded >>= np.uint32(16)
    result: Array = rounded.astype("<u2")
    if (is_nan := np.isnan(single)).any():
        # Set the quiet bit: the upper half alone could be infinity.
        result[is_nan] = (bits[is_nan] >> np.uint32(16)) | np.uint32(0x40)
    return result


def all_finite(raw: Array, dtype: Dtype) -> bool:
    """Whether no element is NaN or infinite. Dtypes other than fp64, fp32, fp16, bf16 pass."""
    if dtype.name not in _INFINITY or not raw.size:
        return True
    infinity, sign = _INFINITY[dtype.name], 1 << (8 * dtype.itemsize - 1)
    # The largest signed integer is the largest positive number; the largest unsigned integer is the
    # negative number of the largest magnitude. Two maxima are faster than isfinite.
    signed, unsigned = (int(raw.view(f"<{kind}{dtype.itemsize}").max()) for kind in "iu")
    return signed < infinity and unsigned < infinity | sign


def num_not_finite(raw: Array, dtype: Dtype) -> int:
    """Count the elements that are NaN or infinite; see `all_finite`."""
    if all_finite(raw, dtype):
        return 0
    return int(np.count_nonzero(~np.isfinite(values(raw, dtype))))
