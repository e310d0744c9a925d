"""`.metadata` of torch's distributed checkpoint (DCP): a pickle with the file of each chunk.

Reading runs no code of the pickle: only stand-ins for DCP's records and plain values are made. It
needs no torch. `dcp_metadata_writer` writes the file.
"""

import io
import math
import pickle
import reprlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from tokamake.checkpoint.tensors import dtypes
from tokamake.checkpoint.tensors.dtypes import Dtype
from tokamake.checkpoint.tensors.extents import overlap
from tokamake.checkpoint.torch_files import pickle_bounds, pickle_writer
from tokamake.errors import UserError, reason_of

SUFFIX = ".distcp"
"""Suffix of DCP's data files, which are concatenated archives of torch.save."""
FILE = ".metadata"
"""Name of the metadata in the folder of a checkpoint."""

_OF_METADATA, _OF_FILES = (
    f"torch.distributed.checkpoint.{name}" for name in ("metadata", "filesystem")
)
_OF_PLANS = "torch.distributed.checkpoint.planner"
_OF_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
RECORDS = {
    "Metadata": _OF_METADATA,
    "MetadataIndex": _OF_METADATA,
    "StorageMeta": _OF_METADATA,
    "TensorStorageMetadata": _OF_METADATA,
    "BytesStorageMetadata": _OF_METADATA,
    "ChunkStorageMetadata": _OF_METADATA,
    "TensorProperties": _OF_METADATA,
    "_MEM_FORMAT_ENCODING": _OF_METADATA,
    "_StorageInfo": _OF_FILES,
}
"""Modules of DCP's classes, by class."""
_PLANS = {
    **dict.fromkeys(("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"), _OF_PLANS),
    **dict.fromkeys(("MCoreMetadata", "MCoreSavePlan"), _OF_MEGATRON),
}
"""Modules of the classes of plans, which megatron.core keeps in `.metadata`; they are ignored."""
_ENUMS = {
    "_MEM_FORMAT_ENCODING": (
        "TORCH_CONTIGUOUS_FORMAT",
        "TORCH_CHANNELS_LAST",
        "TORCH_PRESERVE_FORMAT",
    ),
    "WriteItemType": ("TENSOR", "SHARD", "BYTE_IO"),
}
"""Members of DCP's enums, by enum."""
_PATHS = {
    (module, name)
    for module in ("pathlib", "pathlib._local")
    for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
}
"""Classes of the path that a checkpoint was saved to, which is ignored."""


class StorageLocation(NamedTuple):
    """An archive of torch.save within a file; it holds one chunk."""

    file: str
    """Name in the folder."""
    offset: int
    length: int


class StoredChunk(NamedTuple):
    """A chunk of a tensor."""

    offset: tuple[int, ...]
    size: tuple[int, ...]
    location: StorageLocation | None
    """None: the chunk is in no file."""


class WholeTensor(NamedTuple):
    """A whole tensor."""

    size: tuple[int, ...]
    dtype: Dtype
    chunks: tuple[StoredChunk, ...]


_Index = tuple[str, tuple[int, ...] | None]
"""Key of a tensor or an object, and the offset of a chunk in the tensor."""


class _Record:
    """Stands for an object of DCP, and has its attributes."""

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        # Without a copy for each record, which could fill all memory.
        self.__dict__ = state


class _Properties(_Record):
    """Stands for DCP's TensorProperties; only the dtype is used."""

    def __setstate__(self, values: Any) -> None:
        self.dtype = values[0]


class _Enum(_Record):
    """Stands for an enum of DCP, whose members are ignored."""


class _Refused(Exception):
    """A pickle asks for something that could run code."""


def _enum_member(kind: Any, name: Any) -> _Enum:
    """Stands for getattr, and returns members of one enum only."""
    if not (isinstance(kind, type) and issubclass(kind, _Enum)):
        raise _Refused("an attribute of an object that is no enum")
    if name not in _ENUMS[kind.__name__]:
        raise _Refused(f"{reprlib.repr(name)} of {kind.__name__}")
    return kind()


class _MetadataUnpickler(pickle.Unpickler):
    def __init__(self, pickled: bytes) -> None:
        pickle_bounds.check(pickled)
        super().__init__(io.BytesIO(pickled))
        (self._tuple,) = pickle_bounds.counting(tuple, num_bytes=len(pickled))
        # A pickle can set attributes of the classes that it names, so each file gets its own.
        bases = {"TensorProperties": _Properties, **dict.fromkeys(_ENUMS, _Enum)}
        self.kinds = {
            name: type(name, (bases.get(name, _Record),), {})
            for name in (*RECORDS, *_PLANS, "path")
        }

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for a global."""
        if module in (RECORDS.get(name), _PLANS.get(name)):
            return self.kinds[name]
        if (module, name) in pickle_writer.GETATTR:
            return pickle_bounds.sealed(_enum_member)
        if (module, name) == ("torch", "Size"):
            return self._tuple
        if (module, name) == ("torch.serialization", "_get_layout"):
            return {"torch.strided": "strided"}.__getitem__
        if (module, name) in _PATHS:
            return self.kinds["path"]
        if module == "torch" and (dtype := dtypes.named(name)):
            return dtype
        raise _Refused(f"{module}.{name}")


class Contents(NamedTuple):
    """Tensors and other objects of a checkpoint, by key."""

    tensors: dict[str, WholeTensor]
    objects: dict[str, StorageLocation]
    """Objects that Megatron-LM keeps beside tensors; an archive holds each."""


def read(folder: Path) -> dict[str, WholeTensor]:
    """Read the tensors of a checkpoint that has no other objects, without their data."""
    tensors, objects = read_contents(folder)
    if objects:
        raise UserError(
            f"{folder}: no complete checkpoint ({FILE} has {next(iter(objects))!r}, which is no "
            "tensor); name another one"
        )
    return tensors


def read_contents(folder: Path, *, may_share: bool = False) -> Contents:
    """Read the contents of a checkpoint by key, without data. Two keys `may_share` an archive."""
    file = folder / FILE
    try:
        if (size := file.stat().st_size) > (limit := pickle_bounds.MAX_PICKLE_BYTES):
            raise ValueError(f"{FILE} has {size:,} bytes, over {limit:,}")
        unpickler = _MetadataUnpickler(file.read_bytes())
        return _contents(unpickler.load(), unpickler.kinds, may_share=may_share)
    except FileNotFoundError:
        raise UserError(f"{file}: no such file; name another checkpoint") from None
    except _Refused as error:
        raise UserError(
            f"{file}: asks for {reason_of(error)}, which no checkpoint of tokamake or Megatron-LM "
            "does, so it is not read; name a checkpoint from a source that you trust"
        ) from None
    except Exception as error:  # a damaged pickle can raise anything
        raise UserError(
            f"{folder}: no complete checkpoint ({reason_of(error)}); name another one"
        ) from None


def archives(folder: Path) -> dict[Path, list[tuple[int, int]]]:
    """Return first byte and length of each archive, by file."""
    locations: dict[Path, list[tuple[int, int]]] = defaultdict(list)
    # Two keys may name the same archive.
    for name, offset, length in dict.fromkeys(_locations(read_contents(folder, may_share=True))):
        locations[folder / name].append((offset, length))
    return locations


def _locations(contents: Contents) -> Iterator[StorageLocation]:
    for tensor in contents.tensors.values():
        for chunk in tensor.chunks:
            if chunk.location:
                yield chunk.location
    yield from contents.objects.values()


def check_files(folder: Path, contents: Contents) -> None:
    """Check that all files of a checkpoint exist and are long enough."""
    ends: dict[str, int] = defaultdict(int)
    for name, offset, length in _locations(contents):
        ends[name] = max(ends[name], offset + length)
    for name, end in sorted(ends.items()):
        file = folder / name
        if not file.is_file():
            raise UserError(f"{file}: no such file; name another checkpoint")
        if (size := file.stat().st_size) < end:
            raise UserError(
                f"{file}: damaged: has {size:,} of {end:,} bytes; name another checkpoint"
            )


def _contents(metadata: Any, kinds: Mapping[str, Any], *, may_share: bool) -> Contents:
    """Convert DCP's records. Records that DCP does not write raise any error."""
    if type(metadata) not in (kinds["Metadata"], kinds["MCoreMetadata"]):
        raise ValueError(f"{FILE} holds no metadata")
    locations: dict[_Index, StorageLocation] = {}
    for index, info in metadata.storage_data.items():
        if type(index) is not kinds["MetadataIndex"] or type(info) is not kinds["_StorageInfo"]:
            raise ValueError(f"{FILE} does not say where tensors are")
        # An object has no offset.
        offset = vars(index).get("offset")
        offset = None if offset is None else _integers(offset)
        locations[index.fqn, offset] = _location(index.fqn, info)
    tensors, objects = {}, {}
    for key, record in metadata.state_dict_metadata.items():
        if isinstance(key, str) and type(record) is kinds["BytesStorageMetadata"]:
            objects[key] = locations[key, None]
            continue
        if not isinstance(key, str) or type(record) is not kinds["TensorStorageMetadata"]:
            raise ValueError(f"{FILE} has {key!r}, which is no tensor")
        size, dtype = _integers(record.size), record.properties.dtype
        chunks = tuple(_chunks(key, size, record.chunks, locations))
        _check_complete(key, size, chunks=chunks)
        if not isinstance(dtype, Dtype):
            raise ValueError(f"{FILE} has {key} without dtype")
        tensors[key] = WholeTensor(size, dtype, chunks)
    _check_disjoint(locations, may_share=may_share)
    return Contents(tensors, objects)


def _check_disjoint(locations: Mapping[_Index, StorageLocation], *, may_share: bool) -> None:
    """Check that archives share no bytes; two keys may name the same archive if `may_share`."""
    by_location = sorted(locations.items(), key=lambda item: item[1])
    for (first, before), (second, after) in pairwise(by_location):
        if before.file == after.file and before.offset + before.length > after.offset:
            if may_share and before == after:
                continue
            raise ValueError(
                f"{FILE} has {first[0]} and {second[0]} in the same bytes of {after.file}"
            )


def _integers(value: Any) -> tuple[int, ...]:
    numbers = tuple(value)
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError(f"{FILE} has {value!r} in place of sizes")
    return numbers


def _location(key: str, info: Any) -> StorageLocation:
    name = info.relative_path
    # A path out of the folder would read, and at sealing write, files of the user's.
    if not name or Path(name).name != name or name == "..":
        raise ValueError(f"{FILE} has {key} in {name!r}, which is no file of the folder")
    if vars(info).get("transform_descriptors"):
        raise ValueError(f"{FILE} has {key} in an encoding that is not supported")
    return StorageLocation(name, *_integers((info.offset, info.length)))


def _chunks(
    key: str, shape: tuple[int, ...], records: Any, locations: Mapping[Any, StorageLocation]
) -> Iterator[StoredChunk]:
    for record in records:
        offset, size = _integers(record.offsets), _integers(record.sizes)
        ends = map(sum, zip(offset, size, strict=True))
        if any(end > limit for end, limit in zip(ends, shape, strict=True)):
            raise ValueError(f"{FILE} has a part of {key} that is not within it")
        yield StoredChunk(offset, size, locations.get((key, offset)))


def _check_complete(key: str, shape: tuple[int, ...], *, chunks: Sequence[StoredChunk]) -> None:
    """Check that chunks cover each element of a tensor exactly once."""
    chunk_slices = [
        tuple(slice(at, at + n) for at, n in zip(chunk.offset, chunk.size, strict=True))
        for chunk in chunks
    ]
    if pair := overlap(chunk_slices):
        locations_of_pair = (chunks[number].location for number in pair)
        names = sorted({location.file for location in locations_of_pair if location})
        raise ValueError(f"{FILE} has parts of {key} that overlap, in {' and '.join(names)}")
    num_covered, num_elements = sum(math.prod(chunk.size) for chunk in chunks), math.prod(shape)
    if num_covered != num_elements:
        raise ValueError(f"{FILE} has {num_covered:,} of {num_elements:,} elements of {key}")
