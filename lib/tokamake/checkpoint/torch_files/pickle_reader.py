"""Read files of torch.save: tensors without data, plain values, `argparse.Namespace`.

No code of a file is run.
"""

import io
import math
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from tokamake.checkpoint.tensors import dtypes
from tokamake.checkpoint.tensors.dtypes import Dtype
from tokamake.checkpoint.tensors.extents import dense_strides
from tokamake.checkpoint.torch_files import pickle_bounds
from tokamake.checkpoint.torch_files.allowed_globals import ATTRIBUTE, AllowedGlobals
from tokamake.checkpoint.torch_files.pickle_bounds import sealed
from tokamake.checkpoint.torch_files.pickle_writer import GETATTR
from tokamake.errors import UserError, reason_of

_STORAGES = {dtype.storage: dtype for dtype in dtypes.ALL if dtype.storage}
_UNTYPED = dtypes.named("uint8")
"""Unit of untyped storages; the dtype is then the tensor's, as for 8-bit floats."""
_PLAIN = {"complex": complex, "int": int, "float": float}
"""Python's own types that a pickle may call."""
_COPYING = {
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): tuple,
}
"""Types of collections that a pickle may call."""
_MAX_BYTE_ORDER_BYTES = len(b"little")
_LOCAL = b"PK\x03\x04"


class _Storage(NamedTuple):
    """Data that tensors are views of."""

    dtype: Dtype
    offset: int
    """First byte in the file."""
    numel: int


@dataclass(frozen=True)
class PickledTensor:
    """A tensor without data, and where its data lie in the file."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """In elements, by dimension."""
    dtype: Dtype
    offset: int
    """First byte in the file."""
    begin: int
    """First byte of its storage."""
    end: int
    """First byte after its storage."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_contiguous(self) -> bool:
        steps = zip(self.shape, self.stride, dense_strides(self.shape), strict=True)
        return not self.numel or all(size == 1 or step == dense for size, step, dense in steps)

    def __setstate__(self, _: Any) -> None:
        # A pickle could otherwise change the place of a tensor after the checks.
        raise pickle.UnpicklingError("changes a tensor")


def _rebuild(storage: _Storage, start: int, shape: Any, stride: Any, *_: Any) -> "PickledTensor":
    """Stands for torch's function that rebuilds a tensor."""
    if len(shape) > pickle_bounds.MAX_ARGUMENTS:
        raise ValueError(f"a tensor of {len(shape):,} dimensions")
    shape, stride = tuple(shape), tuple(stride[: len(shape) + 1])
    if len(shape) != len(stride) or any(
        type(number) is not int or number < 0 for number in (start, *shape, *stride)
    ):
        raise ValueError(f"a tensor of shape {shape} and strides {stride}")
    begin, size = storage.offset, storage.dtype.itemsize
    end = begin + storage.numel * size
    return PickledTensor(shape, stride, storage.dtype, begin + start * size, begin, end)


def _rebuild_untyped(
    storage: _Storage, start: int, shape: Any, stride: Any, *arguments: Any
) -> "PickledTensor":
    dtype = arguments[2]
    if not isinstance(dtype, Dtype):
        raise ValueError("a tensor without dtype")
    numel = storage.numel * storage.dtype.itemsize // dtype.itemsize
    return _rebuild(_Storage(dtype, storage.offset, numel), start, shape, stride)


def _retype(rebuild: Any, _type: Any, arguments: Any, _state: Any) -> Any:
    """Rebuild an instance of a subclass of tensors as a plain tensor."""
    if rebuild not in _REBUILD_PLAIN.values():
        raise pickle.UnpicklingError("rebuilds a tensor in an unknown way")
    return rebuild(*arguments)


_REBUILD_PLAIN = {
    ("torch._utils", "_rebuild_tensor_v2"): sealed(_rebuild),
    ("torch._utils", "_rebuild_tensor_v3"): sealed(_rebuild_untyped),
    ("torch._utils", "_rebuild_parameter"): sealed(lambda tensor, *_: tensor),
}
_REBUILD = {**_REBUILD_PLAIN, ("torch._tensor", "_rebuild_from_type_v2"): sealed(_retype)}
"""Stand-ins for torch's functions that rebuild tensors."""


class _TensorUnpickler(pickle.Unpickler):
    """Reads a pickle of torch.save, and calls only the classes and functions of this module.

    Args:
        find: returns the offset in the file of a storage, by its key.
    """

    def __init__(self, pickled: bytes, find: Callable[[str], int]) -> None:
        pickle_bounds.check(pickled)
        super().__init__(io.BytesIO(pickled))
        self._find = find
        stand_ins = pickle_bounds.counting(*_COPYING.values(), num_bytes=len(pickled))
        self._copying = dict(zip(_COPYING, stand_ins, strict=True))
        self._globals = AllowedGlobals()

    def find_class(self, module: str, name: str) -> Any:
        """Return a stand-in for a class or function."""
        if (rebuild := _REBUILD.get((module, name))) is not None:
            return rebuild
        module_now = {"__builtin__": "builtins"}.get(module, module)
        if module_now == "builtins" and name in _PLAIN:
            return _PLAIN[name]
        if (copying := self._copying.get((module_now, name))) is not None:
            return copying
        if (module, name) in GETATTR:
            return ATTRIBUTE
        if (module, name) == ("argparse", "Namespace"):
            return self._globals.namespace
        if (module, name) == ("torch.storage", "UntypedStorage"):
            return _UNTYPED
        if module == "torch" and (dtype := _STORAGES.get(name) or dtypes.named(name)):
            return dtype
        return self._globals.find(module, name)

    def read(self) -> Any:
        content = self.load()
        self._globals.check(content)
        return content

    def persistent_load(self, name: Any) -> _Storage:
        _, dtype, key, _, numel = name
        if not isinstance(dtype, Dtype) or type(numel) is not int:
            raise ValueError("a storage without dtype or size")
        return _Storage(dtype, self._find(key), numel)


class ReadOnlyBytes(io.RawIOBase):
    """A read-only file over some bytes; subclasses have `readinto`."""

    def __init__(self, length: int) -> None:
        self._length, self._position = length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError("seeks before the beginning")
        self._position = base + offset
        return self._position


class View(ReadOnlyBytes):
    """A read-only file over some bytes of another file."""

    def __init__(self, stream: IO[bytes], start: int, *, length: int) -> None:
        super().__init__(length)
        self._stream, self._start = stream, start

    def readinto(self, buffer: Any) -> int:
        self._stream.seek(self._start + self._position)
        content = self._stream.read(max(0, min(len(buffer), self._length - self._position)))
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)


def read(file: Path, remedy: str) -> Any:
    """Read a file of torch.save; tensors are returned as `PickledTensor`."""
    try:
        with file.open("rb") as stream:
            return parse(stream)
    except FileNotFoundError:
        raise UserError(f"{file}: no such file; {remedy}") from None
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{file}: holds more than tensors and plain values, so it is not read "
            f"({reason_of(error)}); {remedy}"
        ) from None
    except zipfile.BadZipFile as error:
        raise UserError(
            f"{file}: damaged ({error}), or written by torch before 1.6; {remedy}, or let torch "
            "load it and save it again"
        ) from None
    except Exception as error:  # a damaged pickle can raise anything
        raise UserError(f"{file}: damaged ({reason_of(error)}); {remedy}") from None


def parse(stream: Any) -> Any:
    """Read an archive of torch.save from a stream; offsets count from the stream's beginning.

    Raises:
        pickle.UnpicklingError: it could run code.
        Exception: of any kind; it is damaged.
    """
    with zipfile.ZipFile(stream) as archive:
        return parse_archive(archive, stream)


def parse_archive(archive: zipfile.ZipFile, stream: Any) -> Any:
    """Read an archive as `parse` does, with its directory already read."""
    entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
    if "byteorder" in entries:
        order = _content(archive, entries["byteorder"], max_bytes=_MAX_BYTE_ORDER_BYTES)
        if order != b"little":
            raise ValueError("its numbers are not little-endian")

    def find(key: str) -> int:
        entry = entries[f"data/{key}"]
        if entry.compress_type:
            raise ValueError("its tensors are compressed")
        return data_offset(stream, entry)

    pickled = _content(archive, entries["data.pkl"], max_bytes=pickle_bounds.MAX_PICKLE_BYTES)
    return _TensorUnpickler(pickled, find).read()


def _content(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, *, max_bytes: int) -> bytes:
    """Return an entry's content, which takes as much memory as the file has bytes for it."""
    if entry.compress_type:
        raise ValueError(f"its {entry.filename} is compressed")
    if entry.file_size > max_bytes:
        raise ValueError(f"its {entry.filename} has {entry.file_size:,} bytes, over {max_bytes:,}")
    return archive.read(entry)


def data_offset(stream: Any, entry: zipfile.ZipInfo) -> int:
    """Return the offset of the content of an entry."""
    stream.seek(entry.header_offset)
    header = stream.read(30)
    if header[:4] != _LOCAL:
        raise UserError(f"{stream.name}: damaged at byte {entry.header_offset}; write it again")
    # The local header may have other extra fields than the central one, which zipfile reads.
    name_length, extra_length = struct.unpack("<HH", header[26:30])
    offset: int = entry.header_offset + len(header) + name_length + extra_length
    return offset
