"""Casts give the same bits as in torch, also for NaN and infinity."""

from itertools import product

import numpy as np
import pytest
import torch

from tokamake.checkpoint.tensors import dtypes
from tokamake.checkpoint.tensors.cast import Array, all_finite, converted, values
from tokamake.checkpoint.tensors.dtypes import FLOAT32, Dtype

FLOATS = [dtype for dtype in dtypes.ALL if "float" in dtype.name and dtype.itemsize > 1]
BFLOAT16, FLOAT16 = (dtypes.OF_WEIGHTS[name] for name in ("bf16", "fp16"))


def of_torch(raw: Array, dtype: Dtype) -> torch.Tensor:
    return torch.from_numpy(raw.view("u1").copy()).view(dtype.torch)


def assert_as_torch(raw: Array, source: Dtype, target: Dtype) -> None:
    """The same bits, except NaN, whose bits in torch depend on the processor."""
    rounded = of_torch(converted(raw, source, target=target), target)
    expected = of_torch(raw, source).to(target.torch)
    assert torch.equal(rounded.isnan(), expected.isnan())
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[target.itemsize]
    sound = ~expected.isnan()
    assert torch.equal(rounded.view(kind)[sound], expected.view(kind)[sound])


def every_upper_half(lower: Array) -> Array:
    upper = np.arange(2**16, dtype="<u4") << np.uint32(16)
    return (upper | lower).view("V4")


def test_all_upper_halves_are_rounded_to_bf16_as_torch_does() -> None:
    generator = np.random.default_rng(0)
    ties = [np.full(2**16, half, "<u4") for half in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    some = [generator.integers(0, 2**16, 2**16, dtype="<u4") for _ in range(8)]
    for lower in (*ties, *some):
        assert_as_torch(every_upper_half(lower), FLOAT32, BFLOAT16)
        assert_as_torch(every_upper_half(lower), FLOAT32, FLOAT16)


@pytest.mark.parametrize(("source", "target"), [*product(FLOATS, FLOATS)], ids=str)
def test_every_pair_of_dtypes_is_cast_as_in_torch(source: Dtype, target: Dtype) -> None:
    if source.itemsize == 2:
        raw = np.arange(2**16, dtype="<u2").view("V2")
    else:
        generator = np.random.default_rng(1)
        raw = generator.integers(0, 256, (2**16, source.itemsize), dtype="u1")
        raw = raw.view(f"V{source.itemsize}").reshape(-1)
        # Random bits seldom are numbers that fp16 has.
        near = generator.standard_normal(2**16).astype(f"<f{source.itemsize}")
        raw = np.concatenate([raw, near.view(raw.dtype)])
    assert_as_torch(raw, source, target)


def test_nan_keeps_its_sign() -> None:
    raw = np.array([0x7F800001, 0xFFFFFFFF, 0x7FC12345], "<u4").view("V4")
    bits = converted(raw, FLOAT32, target=BFLOAT16).view("<u2")
    assert [*bits] == [0x7FC0, 0xFFFF, 0x7FC1]


def test_dtypes_that_numpy_lacks_are_cast_by_torch() -> None:
    eighth = next(dtype for dtype in dtypes.ALL if dtype.name == "float8_e4m3fn")
    raw = np.arange(256, dtype="u1").view("V1")
    for target in (FLOAT32, BFLOAT16):
        assert_as_torch(raw, eighth, target)
    assert values(raw, eighth)[0x38] == 1


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_nan_and_infinity_are_detected_and_the_largest_number_is_finite(dtype: Dtype) -> None:
    largest = torch.finfo(dtype.torch).max
    for value in (0.0, largest, -largest):
        raw = raw_of(torch.tensor([1.0, value], dtype=dtype.torch), dtype)
        assert all_finite(raw, dtype)
    for value in (float("nan"), -float("nan"), float("inf"), -float("inf")):
        raw = raw_of(torch.tensor([1.0, value, 2.0]).to(dtype.torch), dtype)
        assert not all_finite(raw, dtype)


def raw_of(tensor: torch.Tensor, dtype: Dtype) -> Array:
    raw: Array = tensor.view(torch.uint8).numpy().view(f"V{dtype.itemsize}")
    return raw
