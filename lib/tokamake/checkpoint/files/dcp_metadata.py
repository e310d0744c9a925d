"""What torch's distributed checkpoint (DCP) has in which file: `.metadata`, a pickle.

It is read without running anything: only DCP's own records and plain values can come of it. DCP's
reader would run what it finds, so `Reader` takes its place wherever tensors are loaded.
"""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as records
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)

from tokamake.errors import UserError

FILE = ".metadata"
"""Its name in the folder of a checkpoint."""


class _Place:
    """Stands for the path that a checkpoint was saved to, which nobody needs."""

    def __init__(self, *parts: str) -> None:
        pass


# Not BytesStorageMetadata: what it describes, DCP unpickles whatever it is, and we never write it.
_RECORDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorStorageMetadata,
        records.ChunkStorageMetadata,
        records.TensorProperties,
        records._MEM_FORMAT_ENCODING,
    )
}
_KNOWN: dict[tuple[str, str], Any] = {
    **{(records.__name__, name): kind for name, kind in _RECORDS.items()},
    (_StorageInfo.__module__, _StorageInfo.__name__): _StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): {"torch.strided": torch.strided}.__getitem__,
    **{
        (module, name): _Place
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    },
}


class _Refused(Exception):
    """A pickle asks for what could be a program."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Look up what a pickle names."""
        if (found := _KNOWN.get((module, name))) is not None:
            return found
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        raise _Refused(f"{module}.{name}")


@contextmanager
def _unchanged() -> Iterator[None]:
    """Undo what a pickle does to the classes that it may name: it can set their attributes."""
    kinds = [*_RECORDS.values(), _StorageInfo, _Place]
    before = [dict(vars(kind)) for kind in kinds]
    try:
        yield
    finally:
        for kind, attributes in zip(kinds, before, strict=True):
            for name in vars(kind).keys() - attributes.keys():
                delattr(kind, name)
            for name, value in attributes.items():
                if vars(kind).get(name) is not value:
                    setattr(kind, name, value)


def read(folder: Path) -> Metadata:
    """DCP's metadata of a checkpoint, of which all entries are tensors in files of the folder.

    Raises:
        UserError: it is missing, damaged, or could be a program.
    """
    file = folder / FILE
    try:
        with file.open("rb") as stream, _unchanged():
            found = _Unpickler(stream).load()
        _check(found)
    except _Refused as error:
        raise UserError(
            f"{file}: asks for {error}, which no checkpoint of tokamake does, so it is not read; "
            "name a checkpoint of a source that you trust"
        ) from None
    # What a damaged pickle asks for can fail in any way.
    except Exception as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise UserError(f"{folder}: no whole checkpoint ({reason}); name another one") from None
    assert isinstance(found, Metadata)
    return found


def _check(found: Any) -> None:
    """See that a pickle is what DCP writes.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(found, Metadata):
        raise ValueError(f"{FILE} holds no metadata")
    for key, tensor in found.state_dict_metadata.items():
        if not isinstance(key, str) or not isinstance(tensor, TensorStorageMetadata):
            raise ValueError(f"{FILE} has {key!r}, which is no tensor")
        for chunk in tensor.chunks:
            ends = map(sum, zip(chunk.offsets, chunk.sizes, strict=True))
            if any(end > size for end, size in zip(ends, tensor.size, strict=True)):
                raise ValueError(f"{FILE} has a part of {key} that is not within it")
    for index, info in found.storage_data.items():
        if not isinstance(index, MetadataIndex) or not isinstance(info, _StorageInfo):
            raise ValueError(f"{FILE} does not say where tensors are")
        name = info.relative_path
        if not name or Path(name).name != name or name == "..":
            raise ValueError(f"{FILE} has {index.fqn} in {name!r}, which is no file beside it")
        if info.transform_descriptors:
            raise ValueError(f"{FILE} has {index.fqn} in an encoding that is not read")


class Reader(dcp.FileSystemReader):
    """DCP's reader of a folder, which runs nothing that it reads."""

    def read_metadata(self) -> Metadata:
        """What `read` gives, with what DCP adds."""
        metadata = read(Path(self.path))
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata
