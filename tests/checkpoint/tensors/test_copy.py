"""Chunks are copied bit by bit for any strides, and copying needs no torch."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support import hf_folder
from tests.support.random_tensors import random_tensors
from tokamake.checkpoint import writer
from tokamake.checkpoint.detect import open_any
from tokamake.checkpoint.tensors import chunks, copy, dtypes
from tokamake.checkpoint.tensors.checkpoint import OPTIMIZER_SETTINGS, Checkpoint, Target
from tokamake.checkpoint.tensors.copy import fill
from tokamake.checkpoint.tensors.extents import Chunk, Extent
from tokamake.checkpoint.tensors.source import TensorSource
from tokamake.config.architecture import Architecture
from tokamake.errors import UserError

SHAPE = (150, 70)
KEY = "model.x"
SMALL = Architecture(
    vocab_size=250,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
CUTS: dict[str, tuple[list[int], list[int]]] = {
    "whole": ([0, 150], [0, 70]),
    "rows": ([0, 40, 41, 150], [0, 70]),
    "columns": ([0, 150], [0, 30, 70]),
    "rows and columns": ([0, 101, 150], [0, 7, 70]),
}


def slices_of(cut: str) -> Iterator[tuple[slice, ...]]:
    rows, columns = (list(pairwise(each)) for each in CUTS[cut])
    for row, column in product(rows, columns):
        yield slice(*row), slice(*column)


def laid_out(file: Path, cut: str, *, turned: bool, dtype: dtypes.Dtype) -> list[Extent]:
    """Lay out a file whose tensors are slices or their transposes, with some bytes before each."""
    extents, end = [], 3
    for slices in slices_of(cut):
        size = tuple(at.stop - at.start for at in slices)
        stride = (1, size[0]) if turned else None
        chunk = Chunk(KEY, slices, 0, stride)
        shape = size[::-1] if turned else size
        extents.append(Extent(file, "x", end, shape, dtype, (chunk,)))
        end += extents[-1].num_bytes + 5
    file.touch()
    os.truncate(file, end)
    return extents


def values(dtype: torch.dtype) -> Tensor:
    return torch.arange(SHAPE[0] * SHAPE[1]).view(SHAPE).to(dtype)


@pytest.mark.parametrize("turned", [False, True], ids=["rows to", "columns to"])
@pytest.mark.parametrize("was_turned", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize(("cut", "was_cut"), [*product(CUTS, CUTS)])
def test_every_chunk_is_copied(
    tmp_path: Path, cut: str, was_cut: str, was_turned: bool, turned: bool
) -> None:
    for dtype in (dtypes.FLOAT32, dtypes.OF_WEIGHTS["bf16"]):
        extents = laid_out(tmp_path / "a", was_cut, turned=was_turned, dtype=dtype)
        whole = values(dtype.torch)
        for extent in extents:
            (chunk,) = extent.chunks
            chunk.view(extent.map(writable=True)).copy_(whole[chunk.slices])
        targets = laid_out(tmp_path / "b", cut, turned=turned, dtype=dtype)
        begin = (tmp_path / "b").read_bytes()
        source = TensorSource(extents, {KEY: SHAPE})
        assert [*fill(targets, source, keys=[KEY])] == [KEY]
        assert torch.equal(TensorSource(targets, {KEY: SHAPE}).read(KEY), whole)
        for extent in targets:  # what lies between stays as it is
            end = extent.offset + extent.num_bytes
            assert (tmp_path / "b").read_bytes()[end : end + 5] == begin[end : end + 5]


def test_direct_copies_and_slabs_give_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = []
    for min_range_bytes in (1, 10**9):
        monkeypatch.setattr(copy, "_MIN_RANGE_BYTES", min_range_bytes)
        monkeypatch.setattr(chunks, "SLAB", 1000)
        extents = laid_out(tmp_path / "a", "rows and columns", turned=False, dtype=dtypes.FLOAT32)
        for extent in extents:
            extent.map(writable=True).copy_(torch.rand(extent.numel, generator=_generator()))
        (target,) = laid_out(tmp_path / "b", "whole", turned=False, dtype=dtypes.FLOAT32)
        assert [*fill([target], TensorSource(extents, {KEY: SHAPE}), keys=[KEY])] == [KEY]
        contents.append((tmp_path / "b").read_bytes())
        (tmp_path / "b").unlink()
    assert contents[0] == contents[1]


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def test_the_budget_holds_the_largest_tensor() -> None:
    room = copy._ElementBudget(10)
    with room.take(4), room.take(6):
        assert not room._free
    assert room._free == 10


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
def test_parts_that_overlap_and_leave_a_hole_are_damage(tmp_path: Path, columns: bool) -> None:
    extents = []
    for name, start in (("a", 0), ("b", 3)):
        (tmp_path / name).write_bytes(bytes(400))
        slices = slice(start, start + 4), slice(0, 5)
        chunk = Chunk(KEY, slices[::-1] if columns else slices)
        extents.append(Extent(tmp_path / name, "x", 0, chunk.size, dtypes.FLOAT32, (chunk,)))
    with pytest.raises(
        UserError, match=f"/b: damaged: its part of tensor {KEY} overlaps that in .*/a"
    ):
        TensorSource(extents, {KEY: (5, 8) if columns else (8, 5)})


Conversion = dict[str, object]
"""Options of `convert`."""
FORMATS = ["hf", "mds", "mds-pipeline", "megatron", "torch-dist", "universal", "native"]
CAST = [name for name in FORMATS if name != "universal"]


def test_bytes_are_copied_without_torch(tmp_path: Path) -> None:
    hf_folder.write(tmp_path / "a", SMALL, random_tensors(SMALL, 1))
    convert_without_torch(
        *(
            conversion
            for name in FORMATS
            for conversion in there_and_back(tmp_path / "a", tmp_path / name, format=name)
        )
    )
    first = (tmp_path / "a/model.safetensors").read_bytes()
    for name in FORMATS:
        assert (tmp_path / name / "hf/model.safetensors").read_bytes() == first, name


STRIDED = {
    "transposed": lambda each: each.t().contiguous().t(),
    "of longer rows": lambda each: torch.cat([each, each], dim=1)[:, : each.shape[1]],
    "every other": lambda each: torch.stack([each, each], dim=-1)[..., 1],
    "every other, transposed": lambda each: torch.stack([each, each])[1].t().contiguous().t(),
    "a row for all": lambda each: each[:1].expand(each.shape),
}


def test_strided_tensors_are_copied_without_torch(tmp_path: Path) -> None:
    known = random_tensors(SMALL, 1)
    conversions, expected = [], {}
    for kind, stride in STRIDED.items():
        strided = {name: stride(each) if each.dim() > 1 else each for name, each in known.items()}
        assert not any(each.is_contiguous() for each in strided.values() if each.dim() > 1)
        folder, target = tmp_path / kind, tmp_path / f"{kind} to mds"
        hf_folder.write(folder, SMALL, strided)
        whole = folder / "model.safetensors"
        expected[target / "hf" / whole.name] = whole.read_bytes()
        whole.unlink()
        torch.save(strided, folder / "pytorch_model.bin")
        conversions += there_and_back(folder, target, format="mds", tensor_parallel_size=2)
    convert_without_torch(*conversions)
    for path, content in expected.items():
        assert path.read_bytes() == content, path


def test_tensors_without_constant_strides_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(400))
    # Rows of 3 in a tensor of rows of 4.
    chunk = Chunk(KEY, (slice(0, 4), slice(0, 3)))
    extent = Extent(tmp_path / "a", "x", 0, (3, 4), dtypes.FLOAT32, (chunk,), stride=(1, 8))
    with pytest.raises(UserError, match="the strides of tensor x are not supported; save it aga"):
        TensorSource([extent], {KEY: (4, 3)})


def test_numbers_are_cast_without_torch(tmp_path: Path) -> None:
    known = random_tensors(SMALL, 1)
    hf_folder.write(tmp_path / "a", SMALL, known)
    convert_without_torch(
        *(
            conversion
            for name in CAST
            for conversion in there_and_back(
                tmp_path / "a", tmp_path / name, format=name, dtype="bf16"
            )
        )
    )
    for name in CAST:
        _, last = hf_folder.read(tmp_path / name / "hf")
        assert all(torch.equal(last[key], each.bfloat16()) for key, each in known.items()), name


def test_optimizer_states_become_partitions_without_torch(tmp_path: Path) -> None:
    known: dict[str, Tensor | float] = {}
    for name, tensor in random_tensors(SMALL, 1).items():
        moments = {f"optimizer.{kind}.{name}": tensor + 1 for kind in ("exp_avg", "exp_avg_sq")}
        known |= {f"model.{name}": tensor, f"optimizer.step.{name}": 7.0, **moments}
    settings = {"lr": 0.1, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
    begin = Checkpoint(
        "test",
        Path(),
        SMALL,
        TensorSource([], {}, in_memory=known),
        notes={OPTIMIZER_SETTINGS: settings},
    )
    writer.write(tmp_path / "a", begin, "native", Target())
    options: Conversion = {"format": "mds", "data_parallel_size": 3, "zero_stage": 2}
    convert_without_torch(
        {"source": tmp_path / "a", "target": tmp_path / "b", **options},
        {"source": tmp_path / "b", "target": tmp_path / "c", "format": "native"},
    )
    for folder in "bc":
        source = open_any(tmp_path / folder).source
        assert all(torch.equal(source.read(key), begin.source.read(key)) for key in known)


def there_and_back(source: Path, target: Path, **options: object) -> list[Conversion]:
    """Conversions of an hf folder to another one, and to an hf folder in that."""
    return [
        {"source": source, "target": target, **options},
        {"source": target, "target": target / "hf", "format": "hf"},
    ]


def convert_without_torch(*conversions: Conversion) -> None:
    """Convert one after the other in a new process, and check that it imports no large package."""
    program = """
import json, os, sys
from pathlib import Path
os.fsync = lambda _: None
from tokamake.checkpoint.convert import convert
for options in json.loads(sys.argv[1]):
    convert(source=Path(options.pop("source")), target=Path(options.pop("target")), **options)
    for name in ("torch", "transformers", "safetensors"):
        assert name not in sys.modules, (name, options)
"""
    command = [sys.executable, "-c", program, json.dumps(conversions, default=str)]
    subprocess.run(command, check=True)
