"""Writes `.metadata` of torch's distributed checkpoint (DCP); `dcp_metadata` reads it.

The bytes are the same in every version of Python. No torch is needed.
"""

import itertools
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokamake import files
from tokamake.checkpoint.torch_files import pickle_writer
from tokamake.checkpoint.torch_files.dcp_metadata import FILE, RECORDS, StorageLocation, WholeTensor
from tokamake.checkpoint.torch_files.pickle_writer import Call, Global, Instance, Items

VERSION = "1.0.0"
"""Version of DCP's records."""


def write(
    folder: Path,
    tensors: Mapping[str, WholeTensor],
    objects: Mapping[str, StorageLocation] = types.MappingProxyType({}),
) -> None:
    """Write `.metadata`."""
    chunks = (
        (
            _record("MetadataIndex", fqn=key, offset=_size(chunk.offset), index=number),
            _storage_info(chunk.location),
        )
        for key, tensor in tensors.items()
        for number, chunk in enumerate(tensor.chunks)
    )
    places = (
        (_record("MetadataIndex", fqn=key, offset=None, index=None), _storage_info(location))
        for key, location in objects.items()
    )
    content = _record(
        "Metadata",
        state_dict_metadata={
            **{key: _tensor_record(tensor) for key, tensor in tensors.items()},
            **{key: _record("BytesStorageMetadata") for key in objects},
        },
        planner_data={key: (key,) for key in (*tensors, *objects)},
        storage_data=Items(itertools.chain(chunks, places)),
        storage_meta=_record(
            "StorageMeta", checkpoint_id=None, save_id=None, load_id=None, modules=[]
        ),
        version=VERSION,
    )
    with files.atomic(folder / FILE) as (temporary,):
        temporary.write_bytes(pickle_writer.dumps(content, references=True))


def _record(name: str, **values: Any) -> Instance:
    return Instance(_class(name), values)


def _class(name: str) -> Global:
    return Global(RECORDS[name], name)


def _size(numbers: tuple[int, ...]) -> Call:
    return Call(Global("torch", "Size"), (numbers,))


def _tensor_record(tensor: WholeTensor) -> Instance:
    layout = Call(Global("torch.serialization", "_get_layout"), ("torch.strided",))
    contiguous = Call(_class("_MEM_FORMAT_ENCODING"), (0,))
    dtype = Global("torch", tensor.dtype.name)
    properties = _class("TensorProperties")
    return _record(
        "TensorStorageMetadata",
        properties=Instance(properties, (dtype, layout, False, contiguous, False)),
        size=_size(tensor.size),
        chunks=[
            _record("ChunkStorageMetadata", offsets=_size(chunk.offset), sizes=_size(chunk.size))
            for chunk in tensor.chunks
        ],
    )


def _storage_info(location: StorageLocation | None) -> Instance:
    assert location is not None, "each chunk to be written is in a file"
    file, offset, length = location
    return _record("_StorageInfo", relative_path=file, offset=offset, length=length)
