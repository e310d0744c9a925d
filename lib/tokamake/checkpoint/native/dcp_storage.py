"""Reader and writer of torch's distributed checkpoint (DCP): safe, verified, reproducible.

DCP's own reader unpickles `.metadata` without any restriction, and does not compare the data with
the CRC-32 in each archive. DCP's own writer pickles `.metadata` differently in each version of
Python (enum members, paths, the protocol), and adds the folder's path and a random number.
"""

import os
import zipfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from isal import isal_zlib
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from tokamake.checkpoint.native.folder import seal
from tokamake.checkpoint.tensors import dtypes
from tokamake.checkpoint.torch_files import (
    dcp_metadata,
    dcp_metadata_writer,
    pickle_reader,
    torch_archive,
)
from tokamake.checkpoint.torch_files.dcp_metadata import StorageLocation, StoredChunk, WholeTensor
from tokamake.checkpoint.torch_files.pickle_reader import PickledTensor, ReadOnlyBytes
from tokamake.errors import UserError, reason_of
from tokamake.runtime.torch_internals import narrowed, storage_info


class DcpReader(dcp.FileSystemReader):
    """DCP's reader of a folder, with `.metadata` read by `dcp_metadata`."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of this rank's plan."""
        by_file: dict[str, list[tuple[StorageLocation, ReadItem]]] = defaultdict(list)
        for item in plan.items:
            info: Any = self.storage_data[item.storage_index]
            location = StorageLocation(info.relative_path, info.offset, info.length)
            by_file[location.file].append((location, item))
        for name, items in by_file.items():
            with ArchiveTensors(Path(self.path) / name) as archives:
                # In the order of the file: several items may come from one archive.
                for location, item in sorted(items, key=lambda pair: pair[0]):
                    _fill(item, archives.read(location), planner=planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def read_metadata(self) -> Metadata:
        """Return DCP's records of all tensors."""
        tensors = dcp_metadata.read(Path(self.path))
        return Metadata(
            state_dict_metadata={key: _record(tensor) for key, tensor in tensors.items()},
            planner_data={key: (key,) for key in tensors},
            storage_data={
                MetadataIndex(key, torch.Size(chunk.offset), number): storage_info(
                    **chunk.location._asdict()
                )
                for key, tensor in tensors.items()
                for number, chunk in enumerate(tensor.chunks)
                if chunk.location is not None
            },
            storage_meta=StorageMeta(load_id=self.load_id),
            version=dcp_metadata_writer.VERSION,
        )


def _fill(item: ReadItem, stored: Tensor, *, planner: LoadPlanner) -> None:
    """Copy a part of a stored tensor to its place in memory."""
    target = planner.resolve_tensor(item).detach()
    part = narrowed(stored, item.storage_offsets, sizes=item.lengths)
    if target.size() != part.size():
        raise UserError(f"{item.storage_index.fqn} is not of the size in {dcp_metadata.FILE}")
    target.copy_(part)
    planner.commit_tensor(item, target)


def _record(tensor: WholeTensor) -> TensorStorageMetadata:
    chunks = [
        ChunkStorageMetadata(torch.Size(chunk.offset), torch.Size(chunk.size))
        for chunk in tensor.chunks
    ]
    properties = TensorProperties(tensor.dtype.torch)
    return TensorStorageMetadata(properties, torch.Size(tensor.size), chunks)


class ArchiveTensors:
    """Tensors of a file, one at a time."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._stream = file.open("rb", buffering=0)
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._location: StorageLocation | None = None
        self._tensor = self._buffer

    def __enter__(self) -> "ArchiveTensors":
        return self

    def __exit__(self, *_: Any) -> None:
        self._stream.close()

    def read(self, location: StorageLocation) -> Tensor:
        """Return the tensor of an archive; it is valid until the next call."""
        if location != self._location:
            self._location = None
            try:
                self._tensor = self._verified(self._read_bytes(location))
            except Exception as error:  # a damaged archive can raise anything
                raise UserError(f"{self._file.name}: {reason_of(error)}") from None
            self._location = location
        return self._tensor

    def _read_bytes(self, location: StorageLocation) -> Tensor:
        _, start, length = location
        # Before memory is allocated: `.metadata` may say any length.
        if start + length > os.fstat(self._stream.fileno()).st_size:
            raise ValueError("truncated")
        if length > len(self._buffer):
            self._buffer = torch.empty(length, dtype=torch.uint8)
        content = self._buffer[:length]
        left = _bytes_of(content)
        while left:
            if not (num_read := os.preadv(self._stream.fileno(), [left], start)):
                raise ValueError("truncated")
            left, start = left[num_read:], start + num_read
        return content

    @staticmethod
    def _verified(content: Tensor) -> Tensor:
        """Return the tensor of an archive in memory, without a copy."""
        data = _bytes_of(content)
        memory: Any = _Memory(data)
        with zipfile.ZipFile(memory) as archive:
            torch_archive.check_checksums(
                archive,
                memory,
                compute=lambda start, size: isal_zlib.crc32(data[start : start + size]),
            )
            located = pickle_reader.parse_archive(archive, memory)
        if not isinstance(located, PickledTensor) or located.end > len(data):
            raise ValueError("holds no tensor")
        storage = content[located.begin : located.end].view(located.dtype.torch)
        # as_strided counts from the beginning of the buffer.
        first = storage.storage_offset() + (located.offset - located.begin) // storage.itemsize
        return storage.as_strided(located.shape, located.stride, first)


def _bytes_of(content: Tensor) -> memoryview:
    array: Any = content.numpy()
    return memoryview(array)


class _Memory(ReadOnlyBytes):
    """A file over bytes in memory, without a copy of them."""

    def __init__(self, data: memoryview) -> None:
        super().__init__(len(data))
        self._data = data

    def readinto(self, buffer: Any) -> int:
        content = self._data[self._position :][: len(buffer)]
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)


class DcpWriter(dcp.FileSystemWriter):
    """DCP's writer to a folder, with `.metadata` written by `dcp_metadata_writer`."""

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write `.metadata` and hashes. One rank calls it, after all ranks have written tensors."""
        locations = {
            (result.index.fqn, result.index.offset): result.storage_data
            for rank_results in results
            for result in rank_results
        }
        tensors = {
            key: _whole_tensor(key, record, locations=locations)
            for key, record in metadata.state_dict_metadata.items()
        }
        dcp_metadata_writer.write(Path(self.path), tensors)
        seal(Path(self.path))


def _whole_tensor(key: str, record: Any, *, locations: dict[Any, Any]) -> WholeTensor:
    assert isinstance(record, TensorStorageMetadata), "tokamake saves tensors only"
    chunks = []
    for chunk in record.chunks:
        info = locations[key, chunk.offsets]
        location = StorageLocation(info.relative_path, info.offset, info.length)
        chunks.append(StoredChunk(tuple(chunk.offsets), tuple(chunk.sizes), location))
    return WholeTensor(tuple(record.size), dtypes.of(record.properties.dtype), tuple(chunks))
