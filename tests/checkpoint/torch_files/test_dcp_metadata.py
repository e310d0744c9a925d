"""`.metadata` of every Python is read, and every Python writes the same bytes."""

import enum
import pickle
import pickletools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as records
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, TensorProperties

from tests.support.python_pickles import PYTHONS, at_hand
from tokamake.checkpoint.native import training_state
from tokamake.checkpoint.native.dcp_storage import DcpWriter
from tokamake.checkpoint.tensors import dtypes
from tokamake.checkpoint.torch_files import dcp_metadata, dcp_metadata_writer
from tokamake.checkpoint.torch_files.dcp_metadata import StorageLocation, StoredChunk, WholeTensor
from tokamake.errors import UserError
from tokamake.files import write_sealed_json

MODULE = "torch.distributed.checkpoint.metadata"
FORMATS = (torch.contiguous_format, torch.channels_last, torch.preserve_format)


def by_name(member: enum.Enum, _: int) -> Any:
    """As Python 3.11.0 to 3.11.4 pickles members of enums."""
    return getattr, (type(member), member.name)


def described() -> tuple[records.Metadata, dict[str, WholeTensor]]:
    """DCP's records of a tensor of each dtype and order in memory, and ours."""
    tensors, locations, expected = {}, {}, {}
    for number, dtype in enumerate(dtypes.ALL):
        key, format = f"model.{dtype.name}", FORMATS[number % len(FORMATS)]
        size, at, file = torch.Size([number + 1, 2]), torch.Size([0, 0]), f"__{number}_0.distcp"
        chunk = records.ChunkStorageMetadata(at, size)
        properties = TensorProperties(dtype.torch, memory_format=format)
        tensors[key] = records.TensorStorageMetadata(properties, size, [chunk])
        locations[records.MetadataIndex(key, at, 0)] = _StorageInfo(file, 64, 1000)
        stored = StoredChunk((0, 0), tuple(size), StorageLocation(file, 64, 1000))
        expected[key] = WholeTensor(tuple(size), dtype, (stored,))
    storage = records.StorageMeta(Path("/some/folder"), "a number", None, [])
    metadata = records.Metadata(
        tensors, {key: (key,) for key in tensors}, locations, storage, "1.0.0"
    )
    return metadata, expected


# Reading.


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("python", PYTHONS)
def test_metadata_of_every_python_is_read(tmp_path: Path, python: str, protocol: int) -> None:
    metadata, expected = described()
    content = PYTHONS[python].dumps(metadata, protocol)
    (tmp_path / ".metadata").write_bytes(content)
    assert dcp_metadata.read(tmp_path) == expected
    assert (b"getattr" in content) == PYTHONS[python].by_name
    assert (b"pathlib._local" in content) == (python == "3.13")


VALUES = [
    *_MEM_FORMAT_ENCODING,
    *(TensorProperties(dtype.torch) for dtype in dtypes.ALL),
    *(TensorProperties(memory_format=format) for format in FORMATS),
    described()[0],
]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5, None])
@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_imitated_pickles_equal_those_of_this_python(value: Any, protocol: int | None) -> None:
    python = at_hand()
    assert python.dumps(value, protocol) == pickle.dumps(value, protocol)
    others = [other for other in PYTHONS.values() if other.by_name != python.by_name]
    assert all(other.dumps(value, protocol) != pickle.dumps(value, protocol) for other in others)


MEMBER = b"c" + MODULE.encode() + b"\n_MEM_FORMAT_ENCODING\n"
PROPERTIES = b"c" + MODULE.encode() + b"\nTensorProperties\n"
STRIDED = b"ctorch.serialization\n_get_layout\n(Vtorch.strided\ntR"


def asks(of: bytes, name: bytes, module: bytes = b"builtins") -> bytes:
    """Codes that call getattr with what other codes leave."""
    return b"c" + module + b"\ngetattr\n(" + of + name + b"tR"


def holding(member: bytes) -> bytes:
    """A pickle of TensorProperties with the codes of a member."""
    state = b"(ctorch\nfloat32\n" + STRIDED + b"I00\n" + member + b"I00\nt"
    return PROPERTIES + b")\x81" + state + b"b."


@pytest.mark.parametrize("module", [b"builtins", b"__builtin__"])
@pytest.mark.parametrize("name", [each.name for each in _MEM_FORMAT_ENCODING])
def test_members_are_read_by_name(tmp_path: Path, module: bytes, name: str) -> None:
    member = asks(MEMBER, f"V{name}\n".encode(), module)
    torch_reads = pickle.loads(holding(member))
    assert torch_reads.memory_format == FORMATS[_MEM_FORMAT_ENCODING[name].value]
    (tmp_path / ".metadata").write_bytes(holding(member))
    with pytest.raises(UserError, match=r"\(\.metadata holds no metadata\)"):
        dcp_metadata.read(tmp_path)


FORMAT = b"VTORCH_CONTIGUOUS_FORMAT\n"
HOSTILE = {
    "class of the enum": (asks(MEMBER, b"V__class__\n"), "'__class__'"),
    "members of the enum": (asks(MEMBER, b"V__members__\n"), "'__members__'"),
    "method of the enum": (asks(MEMBER, b"Vmro\n"), "'mro'"),
    "missing member": (asks(MEMBER, b"VTORCH_CHANNELS_FIRST\n"), "'TORCH_CHANNELS_FIRST'"),
    "several lines": (asks(MEMBER, b"X\x03\x00\x00\x00a\nb"), r"'a\\nb'"),
    "long name": (asks(MEMBER, b"V" + b"a" * 9999 + b"\n"), r"'a+\.\.\.a+'"),
    "name in bytes": (asks(MEMBER, b"C\x03mro"), "b'mro'"),
    "name in a list": (asks(MEMBER, b"(" + FORMAT + b"l"), r"\['TORCH_CONTIGUOUS_FORMAT'\]"),
    "a member's value": (asks(asks(MEMBER, FORMAT), b"Vvalue\n"), "an object that is no enum"),
    "a member by value": (asks(MEMBER + b"(I0\ntR", FORMAT), "an object that is no enum"),
    "another record": (asks(PROPERTIES, FORMAT), "an object that is no enum"),
    "dtype": (asks(b"ctorch\nfloat32\n", b"Vtorch\n"), "an object that is no enum"),
    "tuple": (asks(b"ctorch\nSize\n", b"V__subclasses__\n"), "an object that is no enum"),
    "text": (asks(b"Vtext\n", b"Vformat\n"), "an object that is no enum"),
    "getattr": (asks(b"cbuiltins\ngetattr\n", b"V__call__\n"), "an object that is no enum"),
    "function": (asks(b"ctorch.serialization\n_get_layout\n", b"V__self__\n"), "no enum"),
    "program": (asks(b"cos\nsystem\n", b"V__call__\n"), r"os\.system"),
    "setattr": (b"cbuiltins\nsetattr\n(" + MEMBER + FORMAT + b"NtR", r"builtins\.setattr"),
    "dotted name": (b"\x80\x04V" + MODULE.encode() + b"\nV_MEM_FORMAT_ENCODING.mro\n\x93", "mro"),
    "one argument": (b"cbuiltins\ngetattr\n(" + MEMBER + b"tR", "no complete checkpoint"),
    "default": (b"cbuiltins\ngetattr\n(" + MEMBER + b"Va\nNtR", "no complete checkpoint"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_getattr_reaches_only_members_of_the_enum(tmp_path: Path, name: str) -> None:
    content, message = HOSTILE[name]
    for pickled in (content + b".", holding(content)):
        (tmp_path / ".metadata").write_bytes(pickled)
        with pytest.raises(UserError, match=message) as error:
            dcp_metadata.read(tmp_path)
        assert str(tmp_path) in str(error.value)
        assert "\n" not in str(error.value)
        assert len(str(error.value)) < 400


# Writing.


def save(folder: Path) -> Path:
    """Save as training does: tensors of all dtypes that are drawn, and a rank's own."""
    tensors = {f"model.{dtype}": torch.ones(3, 2).to(dtype) for dtype in (torch.half, torch.int8)}
    tensors["optimizer.step.a"] = torch.tensor(3.0)
    group: Any = dist.group.WORLD
    training_state.save(folder, tensors, description={}, rank_state=(1, 2), group=group).result()
    return folder


@pytest.mark.usefixtures("lone_rank")
def test_bytes_do_not_depend_on_the_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = save(tmp_path / "first")
    pickled = pickle.dumps(TensorProperties())
    other = (lambda self, _: (type(self), (self.value,))) if at_hand().by_name else by_name
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", other)
    assert pickle.dumps(TensorProperties()) != pickled
    second = save(tmp_path / "second")
    names = sorted(path.name for path in first.iterdir())
    assert names == [".metadata", "__0_0.distcp", "tokamake.json"]
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes()


OTHERS = ("_StorageInfo", "BytesStorageMetadata")
"""Classes that the test names itself, or that native checkpoints do not use."""


@pytest.mark.usefixtures("lone_rank")
def test_metadata_is_independent_of_python_and_folder(tmp_path: Path) -> None:
    content = (save(tmp_path) / ".metadata").read_bytes()
    codes = [(code.name, argument) for code, argument, _ in pickletools.genops(content)]
    assert codes[0] == ("PROTO", 2)
    names = {argument for code, argument in codes if code == "GLOBAL"}
    assert names == {
        *(f"{MODULE} {name}" for name in dcp_metadata.RECORDS if name not in OTHERS),
        "torch.distributed.checkpoint.filesystem _StorageInfo",
        "torch.serialization _get_layout",
        *(f"torch {name}" for name in ("Size", "float16", "int8", "float32", "uint8")),
    }
    assert tmp_path.name.encode() not in content


@pytest.mark.usefixtures("lone_rank")
def test_the_writer_writes_the_same_metadata_as_dcp(tmp_path: Path) -> None:
    tensors = {"model.a": torch.ones(3, 4), "model.b.c": torch.tensor(1, dtype=torch.bfloat16)}
    make: dict[str, Callable[[Path], Any]] = {"ours": DcpWriter, "theirs": dcp.FileSystemWriter}
    metadata = {}
    (tmp_path / "ours").mkdir()
    write_sealed_json(tmp_path / "ours/tokamake.json", {})  # the writer adds hashes to it
    for name, writer in make.items():
        dcp.save(tensors, storage_writer=writer(tmp_path / name))
        metadata[name] = dcp.FileSystemReader(tmp_path / name).read_metadata()
    for name in ("state_dict_metadata", "planner_data", "storage_data", "version"):
        assert getattr(metadata["ours"], name) == getattr(metadata["theirs"], name)
    assert [path.name for path in (tmp_path / "ours").glob("*.tmp*")] == []


def test_many_names_are_written_once(tmp_path: Path) -> None:
    # References to more than 256 names are longer.
    place = StorageLocation("__0_0.distcp", 0, 0)
    whole = WholeTensor((1,), dtypes.FLOAT32, (StoredChunk((0,), (1,), place),))
    tensors = {
        f"model.{n}": whole._replace(
            chunks=(StoredChunk((0,), (1,), StorageLocation("__0_0.distcp", 8 * n, 8)),)
        )
        for n in range(1000)
    }
    dcp_metadata_writer.write(tmp_path, tensors)
    content = (tmp_path / ".metadata").read_bytes()
    assert dcp_metadata.read(tmp_path) == tensors
    assert content.count(b"TensorProperties") == content.count(b"model.999") == 1
    assert [*dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata] == [*tensors]
