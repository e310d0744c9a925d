"""What torch's distributed checkpoint (DCP) has in which file: `.metadata`, a pickle.

Reading runs nothing of it: only DCP's own records and plain values can come of it. What is written
has the same bytes on every Python. Neither needs torch.
"""

import math
import pickle
import reprlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from tokamake import files
from tokamake.checkpoint.tensors import dtypes
from tokamake.checkpoint.tensors.dtypes import Dtype
from tokamake.checkpoint.tensors.extents import overlap
from tokamake.checkpoint.torch_files import pickle_writer
from tokamake.checkpoint.torch_files.pickle_writer import Call, Global, Items, Made
from tokamake.errors import UserError

SUFFIX = ".distcp"
"""Of files of many archives, one after the other."""
FILE = ".metadata"
"""Its name in the folder of a checkpoint."""
VERSION = "1.0.0"
"""Of DCP's records, as we write them."""

_OF_METADATA, _OF_FILES = (
    f"torch.distributed.checkpoint.{name}" for name in ("metadata", "filesystem")
)
# Not BytesStorageMetadata: what it describes, DCP unpickles whatever it is, and we never write it.
_RECORDS = {
    "Metadata": _OF_METADATA,
    "MetadataIndex": _OF_METADATA,
    "StorageMeta": _OF_METADATA,
    "TensorStorageMetadata": _OF_METADATA,
    "ChunkStorageMetadata": _OF_METADATA,
    "TensorProperties": _OF_METADATA,
    "_MEM_FORMAT_ENCODING": _OF_METADATA,
    "_StorageInfo": _OF_FILES,
}
"""DCP's classes, and where they are."""
_MEMORY_FORMATS = (
    "TORCH_CONTIGUOUS_FORMAT",
    "TORCH_CHANNELS_LAST",
    "TORCH_PRESERVE_FORMAT",
)
"""Members of DCP's enum _MEM_FORMAT_ENCODING."""
_PATHS = {
    (module, name)
    for module in ("pathlib", "pathlib._local")
    for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
}
"""What the path is that a checkpoint was saved to, which nobody needs."""


class StorageLocation(NamedTuple):
    """Where a box of a tensor lies: an archive of torch.save within a file."""

    file: str
    """Its name in the folder."""
    offset: int
    length: int


class StoredChunk(NamedTuple):
    """A part of a tensor."""

    offset: tuple[int, ...]
    size: tuple[int, ...]
    place: StorageLocation | None
    """None: in no file."""


class WholeTensor(NamedTuple):
    """A tensor."""

    size: tuple[int, ...]
    dtype: Dtype
    boxes: tuple[StoredChunk, ...]


class _Record:
    """Stands for one of DCP's; has its attributes."""

    def __init__(self, *_: Any) -> None:
        pass


class _Properties(_Record):
    """Stands for DCP's TensorProperties, of which the number format counts."""

    def __setstate__(self, values: Any) -> None:
        self.dtype = values[0]


class _MemoryFormat(_Record):
    """Stands for DCP's _MEM_FORMAT_ENCODING, which does not count."""


class _Refused(Exception):
    """A pickle asks for what could be a program."""


class _Member:
    """Stands for getattr, and gives members of one enum alone.

    It has no attributes, so that no file can change it.
    """

    __slots__ = ()

    def __call__(self, kind: Any, name: Any) -> _MemoryFormat:
        if not (isinstance(kind, type) and issubclass(kind, _MemoryFormat)):
            raise _Refused("an attribute of what is no enum")
        if name not in _MEMORY_FORMATS:
            raise _Refused(f"{reprlib.repr(name)} of _MEM_FORMAT_ENCODING")
        return kind()


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        # A pickle can set attributes of the classes that it names: they are of this file alone.
        bases = {"TensorProperties": _Properties, "_MEM_FORMAT_ENCODING": _MemoryFormat}
        self.kinds = {
            name: type(name, (bases.get(name, _Record),), {}) for name in (*_RECORDS, "path")
        }

    def find_class(self, module: str, name: str) -> Any:
        """Look up what a pickle names."""
        if _RECORDS.get(name) == module:
            return self.kinds[name]
        if (module, name) in pickle_writer.GETATTR:
            return _Member()
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module, name) == ("torch.serialization", "_get_layout"):
            return {"torch.strided": "strided"}.__getitem__
        if (module, name) in _PATHS:
            return self.kinds["path"]
        if module == "torch" and (dtype := dtypes.named(name)):
            return dtype
        raise _Refused(f"{module}.{name}")


def read(folder: Path) -> dict[str, WholeTensor]:
    """Tensors of a checkpoint by key, as DCP's metadata describes them.

    Raises:
        UserError: it is missing, damaged, could be a program, or has more than tensors in files of
            the folder.
    """
    file = folder / FILE
    try:
        with file.open("rb") as stream:
            unpickler = _Unpickler(stream)
            return _tensors(unpickler.load(), unpickler.kinds)
    except _Refused as error:
        raise UserError(
            f"{file}: asks for {_line(error)}, which no checkpoint of tokamake does, so it is not "
            "read; name a checkpoint of a source that you trust"
        ) from None
    # What a damaged pickle asks for can fail in any way.
    except Exception as error:
        reason = _line(error) or type(error).__name__
        raise UserError(f"{folder}: no whole checkpoint ({reason}); name another one") from None


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def archives(folder: Path) -> dict[Path, list[tuple[int, int]]]:
    """First byte and length of each archive in a checkpoint's files.

    Raises:
        UserError: as `read`.
    """
    found: dict[Path, list[tuple[int, int]]] = defaultdict(list)
    for tensor in read(folder).values():
        for box in tensor.boxes:
            if box.place:
                found[folder / box.place.file].append((box.place.offset, box.place.length))
    return found


def _tensors(found: Any, kinds: Mapping[str, Any]) -> dict[str, WholeTensor]:
    """What a pickle says.

    Raises:
        ValueError: it is not what DCP writes; so do LookupError and the like say.
    """
    if type(found) is not kinds["Metadata"]:
        raise ValueError(f"{FILE} holds no metadata")
    places: dict[tuple[str, tuple[int, ...]], StorageLocation] = {}
    for index, info in found.storage_data.items():
        if type(index) is not kinds["MetadataIndex"] or type(info) is not kinds["_StorageInfo"]:
            raise ValueError(f"{FILE} does not say where tensors are")
        places[index.fqn, _numbers(index.offset)] = _place(index.fqn, info)
    tensors = {}
    for key, tensor in found.state_dict_metadata.items():
        if not isinstance(key, str) or type(tensor) is not kinds["TensorStorageMetadata"]:
            raise ValueError(f"{FILE} has {key!r}, which is no tensor")
        size, dtype = _numbers(tensor.size), tensor.properties.dtype
        boxes = tuple(_boxes(key, size, tensor.chunks, places))
        _check_whole(key, size, boxes)
        if not isinstance(dtype, Dtype):
            raise ValueError(f"{FILE} has {key} without number format")
        tensors[key] = WholeTensor(size, dtype, boxes)
    _check_apart(places)
    return tensors


def _check_apart(places: Mapping[tuple[str, tuple[int, ...]], StorageLocation]) -> None:
    """See that no two archives have bytes in common.

    Raises:
        ValueError: two have.
    """
    for (one, before), (other, after) in pairwise(sorted(places.items(), key=lambda each: each[1])):
        if before.file == after.file and before.offset + before.length > after.offset:
            raise ValueError(
                f"{FILE} has {one[0]} and {other[0]} in the same bytes of {after.file}"
            )


def _numbers(value: Any) -> tuple[int, ...]:
    found = tuple(value)
    if any(type(each) is not int or each < 0 for each in found):
        raise ValueError(f"{FILE} has {value!r} in the place of sizes")
    return found


def _place(key: str, info: Any) -> StorageLocation:
    name = info.relative_path
    if not name or Path(name).name != name or name == "..":
        raise ValueError(f"{FILE} has {key} in {name!r}, which is no file beside it")
    if vars(info).get("transform_descriptors"):
        raise ValueError(f"{FILE} has {key} in an encoding that is not read")
    return StorageLocation(name, *_numbers((info.offset, info.length)))


def _boxes(
    key: str, whole: tuple[int, ...], chunks: Any, places: Mapping[Any, StorageLocation]
) -> Iterator[StoredChunk]:
    for chunk in chunks:
        offset, size = _numbers(chunk.offsets), _numbers(chunk.sizes)
        ends = map(sum, zip(offset, size, strict=True))
        if any(end > most for end, most in zip(ends, whole, strict=True)):
            raise ValueError(f"{FILE} has a part of {key} that is not within it")
        yield StoredChunk(offset, size, places.get((key, offset)))


def _check_whole(key: str, whole: tuple[int, ...], boxes: Sequence[StoredChunk]) -> None:
    """See that boxes, which are within a tensor, are all of it, and none of it twice.

    Raises:
        ValueError: they are not.
    """
    places = [
        tuple(slice(at, at + n) for at, n in zip(box.offset, box.size, strict=True))
        for box in boxes
    ]
    if twice := overlap(places):
        files = sorted({box.place.file for box in (boxes[n] for n in twice) if box.place})
        raise ValueError(f"{FILE} has parts of {key} that overlap, in {' and '.join(files)}")
    found, size = sum(math.prod(box.size) for box in boxes), math.prod(whole)
    if found != size:
        raise ValueError(f"{FILE} has {found:,} of {size:,} elements of {key}")


def write(folder: Path, tensors: Mapping[str, WholeTensor]) -> None:
    """Write what DCP would of tensors by key, of which all boxes are in files."""
    content = _made(
        "Metadata",
        state_dict_metadata={key: _described(tensor) for key, tensor in tensors.items()},
        planner_data={key: (key,) for key in tensors},
        storage_data=Items(
            (_made("MetadataIndex", fqn=key, offset=_size(box.offset), index=number), _info(box))
            for key, tensor in tensors.items()
            for number, box in enumerate(tensor.boxes)
        ),
        storage_meta=_made(
            "StorageMeta", checkpoint_id=None, save_id=None, load_id=None, modules=[]
        ),
        version=VERSION,
    )
    with files.atomic(folder / FILE) as (temporary,):
        temporary.write_bytes(pickle_writer.dumps(content, references=True))


def _made(name: str, **values: Any) -> Made:
    return Made(Global(_RECORDS[name], name), values)


def _size(numbers: tuple[int, ...]) -> Call:
    return Call(Global("torch", "Size"), (numbers,))


def _described(tensor: WholeTensor) -> Made:
    """Shape and number format, and that it lies on the CPU row after row."""
    layout = Call(Global("torch.serialization", "_get_layout"), ("torch.strided",))
    rows = Call(Global(_OF_METADATA, "_MEM_FORMAT_ENCODING"), (0,))
    dtype = Global("torch", tensor.dtype.name)
    properties = Global(_OF_METADATA, "TensorProperties")
    return _made(
        "TensorStorageMetadata",
        properties=Made(properties, (dtype, layout, False, rows, False)),
        size=_size(tensor.size),
        chunks=[
            _made("ChunkStorageMetadata", offsets=_size(box.offset), sizes=_size(box.size))
            for box in tensor.boxes
        ],
    )


def _info(box: StoredChunk) -> Made:
    assert box.place is not None, "only what is in a file is written"
    file, offset, length = box.place
    return _made("_StorageInfo", relative_path=file, offset=offset, length=length)
