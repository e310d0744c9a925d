"""torch and zipfile read the files of the archive writer; no pickle changes the reader."""

import argparse
import zipfile
from pathlib import Path

import pytest
import torch

from tokamake.checkpoint.tensors import dtypes
from tokamake.checkpoint.tensors.dtypes import Dtype
from tokamake.checkpoint.tensors.extents import Chunk, PlannedTensor
from tokamake.checkpoint.torch_files import pickle_reader, torch_archive
from tokamake.errors import UserError

PLAIN = {
    "none": None,
    "true": True,
    "numbers": [0, -1, 255, 2**31, -(2**31) - 1, 10**30, 1.5, float("inf")],
    "text": "Ünï\n",
    "nested": ({"a": (1, [2, ()])}, []),
    "set": {1, 2},
    "args": argparse.Namespace(a=1, b={"c": None}),
}


@pytest.mark.parametrize("dtype", [each for each in dtypes.ALL if each.storage], ids=str)
def test_torch_loads_what_we_write(tmp_path: Path, dtype: Dtype) -> None:
    shapes = {"matrix": (3, 5), "number": (), "empty": (0, 4), "vector": (7,)}
    tensors = {name: PlannedTensor(shape, dtype, ()) for name, shape in shapes.items()}
    file = tmp_path / "a.pt"
    extents = {each.name: each for each in torch_archive.lay_out(file, {**tensors, **PLAIN})}
    assert all(each.offset % 64 == 0 for each in extents.values())
    for extent in extents.values():
        if extent.numel:
            extent.map(writable=True).fill_(1)
    torch_archive.seal(file, torch_archive.archives([file])[file])
    with zipfile.ZipFile(file) as archive:
        assert archive.testzip() is None
    with torch.serialization.safe_globals([argparse.Namespace]):
        for mapped in (False, True):
            state = torch.load(file, weights_only=True, mmap=mapped)
            assert {name: state[name] for name in PLAIN} == PLAIN
            for name, shape in shapes.items():
                assert torch.equal(state[name], torch.ones(shape, dtype=dtype.torch))
    located = pickle_reader.read(file, "")
    for name, shape in shapes.items():
        assert (located[name].shape, located[name].dtype) == (shape, dtype)
        assert located[name].offset == extents[name].offset


def test_files_beyond_4_gb_are_laid_out(tmp_path: Path) -> None:
    file, large = tmp_path / "a.pt", PlannedTensor((2**30 + 1,), dtypes.FLOAT32, ())
    small = PlannedTensor((2,), dtypes.FLOAT32, ())
    _, last = torch_archive.lay_out(file, {"large": large, "small": small})
    assert last.offset > 2**32
    assert file.stat().st_blocks * 512 < 2**20
    last.map(writable=True).copy_(torch.tensor([1.0, 2.0]))
    state = torch.load(file, weights_only=True, mmap=True)
    assert state["small"].tolist() == [1.0, 2.0]
    assert state["large"].shape == large.shape
    located = pickle_reader.read(file, "")
    assert (located["large"].numel, located["small"].offset) == (large.numel, last.offset)


def test_chunks_and_replicas_are_kept(tmp_path: Path) -> None:
    chunk = Chunk("model.x", (slice(0, 2),))
    planned = PlannedTensor((2,), dtypes.FLOAT32, (chunk,), is_replica=True)
    (extent,) = torch_archive.lay_out(tmp_path / "a.pt", [planned])
    assert (extent.chunks, extent.is_replica, extent.name) == ((chunk,), True, "0")


def hostile(file: Path, content: bytes) -> None:
    """An archive with a pickle of one's own."""
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/data/0", bytes(8))


@pytest.mark.parametrize(
    "content",
    [
        b"ctorch\nfloat32\n}S'itemsize'\nI1\nsb.",
        b"ctorch\nfloat32\n(N}S'itemsize'\nI1\nstb.",
        b"ctorch\nFloatStorage\n}S'name'\nS'int8'\nsb.",
    ],
)
def test_a_pickle_cannot_change_dtypes(tmp_path: Path, content: bytes) -> None:
    before = [vars(each).copy() for each in dtypes.ALL]
    hostile(tmp_path / "a.pt", content)
    with pytest.raises(UserError, match="damaged"):
        pickle_reader.read(tmp_path / "a.pt", "fetch it again")
    assert [vars(each) for each in dtypes.ALL] == before
    assert (dtypes.FLOAT32.itemsize, dtypes.FLOAT32.name) == (4, "float32")


@pytest.mark.parametrize("stride", ["(I-1\nt", "(S'a'\nt", "(I1\nI1\nt", "(t"])
def test_an_invalid_tensor_is_damage(tmp_path: Path, stride: str) -> None:
    storage = b"(S'storage'\nctorch\nFloatStorage\nS'0'\nS'cpu'\nI2\ntQ"
    content = b"}S'a'\nctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"I0\n(I2\nt"
    content += stride.encode() + b"I00\n}tRs."
    hostile(tmp_path / "a.pt", content)
    with pytest.raises(UserError, match=r"a\.pt: damaged .*a tensor of shape"):
        pickle_reader.read(tmp_path / "a.pt", "fetch it again")


def test_the_widest_dtype_holds_all_others() -> None:
    names = dtypes.OF_WEIGHTS
    assert dtypes.widest([names["bf16"], names["bf16"]]) == names["bf16"]
    assert dtypes.widest([names["bf16"], names["fp16"]]) == names["fp32"]
    for each in dtypes.ALL:
        assert dtypes.of(each.torch) == each
        assert each.torch.itemsize == each.itemsize
