"""Whole tensors assembled from extents of files and from memory."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tokamake.checkpoint.tensors.dtypes import ALL, FLOAT32, OF_WEIGHTS, Dtype
from tokamake.checkpoint.tensors.extents import Chunk, Extent, Slices, whole_slices
from tokamake.checkpoint.tensors.source import TensorSource
from tokamake.errors import UserError

WHOLE = torch.arange(12, dtype=torch.float32).reshape(4, 3)
TOP, BOTTOM = (slice(0, 1), slice(0, 3)), (slice(1, 4), slice(0, 3))


def store(
    path: Path, slices: Slices, *, key: str = "w", whole: Any = WHOLE, **changes: Any
) -> Extent:
    """Write some rows of a tensor to a file."""
    values = whole[slices]
    path.write_bytes(values.numpy().tobytes())
    chunk = Chunk(key, slices, is_mean=changes.pop("is_mean", False))
    return Extent(path, key, 0, tuple(values.shape), FLOAT32, (chunk,), **changes)


@pytest.fixture
def halves(tmp_path: Path) -> list[Extent]:
    return [store(tmp_path / "top", TOP), store(tmp_path / "bottom", BOTTOM)]


def test_a_tensor_is_assembled_from_several_files(halves: list[Extent]) -> None:
    source = TensorSource(halves, {"w": [4, 3]})
    assert torch.equal(source.read("w"), WHOLE)
    assert (list(source), "w" in source, "x" in source) == (["w"], True, False)
    assert source.shapes == {"w": (4, 3)}
    assert [extent.file.name for extent, _ in source.file_chunks("w")] == ["top", "bottom"]


def test_a_tensor_in_one_extent_is_mapped(tmp_path: Path) -> None:
    source = TensorSource([store(tmp_path / "w", whole_slices((4, 3)))], {"w": (4, 3)})
    tensor = source.read("w")
    assert torch.equal(tensor, WHOLE)
    assert tensor.untyped_storage().nbytes() == 48


def test_replicas_and_means_are_no_chunks_of_the_tensor(
    tmp_path: Path, halves: list[Extent]
) -> None:
    replica = store(tmp_path / "replica", TOP, is_replica=True)
    mean = store(tmp_path / "mean", TOP, is_mean=True)
    source = TensorSource([replica, mean, *halves], {"w": (4, 3)})
    assert len(source.file_chunks("w")) == 2
    assert len(source.extents) == 4


def test_a_missing_chunk_is_an_error(halves: list[Extent]) -> None:
    with pytest.raises(UserError, match="has 9 of 12 elements of tensor w; check that all files"):
        TensorSource(halves[1:], {"w": (4, 3)})


def test_a_tensor_without_files_is_an_error() -> None:
    with pytest.raises(UserError, match="checkpoint: has 0 of 12 elements of tensor w"):
        TensorSource([], {"w": (4, 3)})


def test_chunks_that_overlap_are_an_error(tmp_path: Path, halves: list[Extent]) -> None:
    again = store(tmp_path / "again", (slice(0, 2), slice(0, 3)))
    with pytest.raises(UserError, match="again: damaged: its part of tensor w overlaps that in"):
        TensorSource([halves[0], again, halves[1]], {"w": (4, 3)})


def test_a_truncated_file_is_an_error(halves: list[Extent]) -> None:
    halves[1].file.write_bytes(bytes(35))
    with pytest.raises(UserError, match="bottom: damaged: has 35 bytes"):
        TensorSource(halves, {"w": (4, 3)})


def test_the_widest_dtype_of_the_chunks_is_that_of_the_tensor(tmp_path: Path) -> None:
    path = tmp_path / "half"
    path.write_bytes(WHOLE[:1].half().numpy().tobytes())
    half = Extent(path, "w", 0, (1, 3), OF_WEIGHTS["fp16"], (Chunk("w", TOP),))
    source = TensorSource([half, store(tmp_path / "bottom", BOTTOM)], {"w": (4, 3)})
    assert source.dtype("w") == FLOAT32
    assert torch.equal(source.read("w"), WHOLE)


def test_tensors_and_numbers_in_memory_need_no_file() -> None:
    memory = {"t": WHOLE.bfloat16(), "n": 2.5}
    source = TensorSource([], {}, in_memory=memory)
    assert source.shapes == {"t": (4, 3), "n": ()}
    assert (source.dtype("t"), source.dtype("n")) == (OF_WEIGHTS["bf16"], FLOAT32)
    assert source.file_chunks("t") == []
    assert torch.equal(source.read("t"), WHOLE.bfloat16())
    assert (source.number("n"), source.read("n")) == (2.5, 2.5)


def test_the_first_rows_of_some_tensors(tmp_path: Path, halves: list[Extent]) -> None:
    other = store(tmp_path / "other", whole_slices((4, 3)), key="other")
    source = TensorSource([*halves, other], {"w": (4, 3), "other": (4, 3)}, in_memory={"n": 1.0})
    first = source.first_rows(["w"], 2)
    assert first.shapes == {"w": (2, 3), "other": (4, 3), "n": ()}
    assert torch.equal(first.read("w"), WHOLE[:2])
    assert torch.equal(first.read("other"), WHOLE)
    assert torch.equal(source.first_rows(["w"], 1).read("w"), WHOLE[:1])


@pytest.mark.parametrize(
    "name",
    ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8"],
)
def test_a_number_is_read_without_torch(tmp_path: Path, name: str) -> None:
    value = torch.tensor(100, dtype=getattr(torch, name))
    path = tmp_path / "numbers"
    path.write_bytes(
        b"pad" + bytes(value.itemsize) + value.reshape(1).view(torch.uint8).numpy().tobytes()
    )
    dtype = next(each for each in ALL if each.name == name)
    extent = Extent(path, "n", 3, (2,), dtype, (Chunk("n", (), 1),))
    assert TensorSource([extent], {"n": ()}).number("n") == 100.0


def test_a_number_of_an_unusual_dtype_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "number"
    path.write_bytes(np.complex64(1).tobytes())
    extent = Extent(path, "n", 0, (), Dtype("complex64", 8), (Chunk("n", ()),))
    with pytest.raises(UserError, match=r"tensor n is torch\.complex64, which is not supported"):
        TensorSource([extent], {"n": ()}).number("n")
