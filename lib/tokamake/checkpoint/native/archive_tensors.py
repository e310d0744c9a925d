"""Read tensors of archives in DCP's files, and verify their checksums while they are in memory."""

import os
import zipfile
from pathlib import Path
from typing import Any

import torch
from isal import isal_zlib
from torch import Tensor

from tokamake.checkpoint.torch_files import pickle_reader, torch_archive
from tokamake.checkpoint.torch_files.dcp_metadata import StorageLocation
from tokamake.checkpoint.torch_files.pickle_reader import PickledTensor, ReadOnlyBytes
from tokamake.errors import UserError


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
                reason = str(error).partition("\n")[0] or type(error).__name__
                raise UserError(f"{self._file.name}: {reason}") from None
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
