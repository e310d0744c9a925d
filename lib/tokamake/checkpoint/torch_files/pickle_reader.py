"""What is in files of torch.save: tensors without their data, plain values, `argparse.Namespace`.

Nothing that a file could run is run.
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
from tokamake.checkpoint.torch_files.allowed_globals import AllowedGlobals, Attribute
from tokamake.checkpoint.torch_files.pickle_writer import GETATTR
from tokamake.errors import UserError

_STORAGES = {dtype.storage: dtype for dtype in dtypes.ALL if dtype.storage}
_UNTYPED = dtypes.named("uint8")
"""What storages count in whose number format is the tensor's, as those of 8 bit floats."""
_PLAIN = {"set": set, "frozenset": frozenset, "complex": complex, "int": int, "float": float}
"""Types of Python's own that are read."""
_LOCAL = b"PK\x03\x04"


class _Storage(NamedTuple):
    """What tensors are views of."""

    dtype: Dtype
    offset: int
    """Its first byte in the file."""
    numel: int


@dataclass(frozen=True)
class Located:
    """A tensor without data that knows where they lie in its file."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """Elements from one to the next in each dimension."""
    dtype: Dtype
    offset: int
    """Its first byte."""
    begin: int
    """First byte of the storage that it is a view of."""
    end: int
    """First byte after that."""

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def is_contiguous(self) -> bool:
        """Whether it lies row after row, without gaps."""
        dense = 1
        for size, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and step != dense:
                return not self.numel
            dense *= size
        return True

    def __setstate__(self, _: Any) -> None:
        """Refuse: a pickle can do so with what it has made."""
        raise pickle.UnpicklingError("changes a tensor")


class _Rebuild:
    """Makes tensors without data. It has no attributes, so that no file can change it."""

    __slots__ = ()

    def __call__(
        self, storage: _Storage, start: int, shape: Any, stride: Any, *_: Any
    ) -> "Located":
        shape, stride = tuple(shape), tuple(stride)
        if len(shape) != len(stride) or any(
            type(each) is not int or each < 0 for each in (start, *shape, *stride)
        ):
            raise ValueError(f"a tensor of shape {shape} and strides {stride}")
        begin, size = storage.offset, storage.dtype.itemsize
        end = begin + storage.numel * size
        return Located(shape, stride, storage.dtype, begin + start * size, begin, end)


class _RebuildUntyped:
    """The same of a storage of bytes; see `_Rebuild`."""

    __slots__ = ()

    def __call__(
        self, storage: _Storage, start: int, shape: Any, stride: Any, *rest: Any
    ) -> "Located":
        dtype = rest[2]
        if not isinstance(dtype, Dtype):
            raise ValueError("a tensor without number format")
        numel = storage.numel * storage.dtype.itemsize // dtype.itemsize
        return _Rebuild()(_Storage(dtype, storage.offset, numel), start, shape, stride)


class _Parameter:
    """Makes a parameter the tensor that it is; see `_Rebuild`."""

    __slots__ = ()

    def __call__(self, tensor: Any, *_: Any) -> Any:
        return tensor


class _Retype:
    """Makes what was a subclass of tensors a plain one; see `_Rebuild`."""

    __slots__ = ()

    def __call__(self, rebuild: Any, _type: Any, arguments: Any, _state: Any) -> Any:
        if not isinstance(rebuild, _Rebuild | _RebuildUntyped | _Parameter):
            raise pickle.UnpicklingError("makes a tensor in a way that is not known")
        return rebuild(*arguments)


_REBUILD = {
    ("torch._utils", "_rebuild_tensor_v2"): _Rebuild(),
    ("torch._utils", "_rebuild_tensor_v3"): _RebuildUntyped(),
    ("torch._utils", "_rebuild_parameter"): _Parameter(),
    ("torch._tensor", "_rebuild_from_type_v2"): _Retype(),
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): tuple,
}


class _Unpickler(pickle.Unpickler):
    """Reads what torch.save has pickled, and calls nothing but what is named here.

    Args:
        stream: of the pickle.
        find: place in the file of the storage with a key.
    """

    def __init__(self, stream: IO[bytes], find: Callable[[str], int]) -> None:
        super().__init__(stream)
        self._find = find
        self._names = AllowedGlobals()

    def find_class(self, module: str, name: str) -> Any:
        """Look up what a pickle names.

        Raises:
            pickle.UnpicklingError: it could run something.
        """
        if (found := _REBUILD.get((module, name))) is not None:
            return found
        if module in ("builtins", "__builtin__") and name in _PLAIN:
            return _PLAIN[name]
        if (module, name) in GETATTR:
            return Attribute()
        if (module, name) == ("argparse", "Namespace"):
            return self._names.namespace
        if (module, name) == ("torch.storage", "UntypedStorage"):
            return _UNTYPED
        if module == "torch" and (dtype := _STORAGES.get(name) or dtypes.named(name)):
            return dtype
        return self._names.find(module, name)

    def read(self) -> Any:
        """What the pickle holds.

        Raises:
            pickle.UnpicklingError: it could run something.
        """
        found = self.load()
        self._names.check(found)
        return found

    def persistent_load(self, name: Any) -> _Storage:
        """Where a storage lies."""
        _, dtype, key, _, numel = name
        if not isinstance(dtype, Dtype) or type(numel) is not int:
            raise ValueError("a storage without number format or size")
        return _Storage(dtype, self._find(key), numel)


class View(io.RawIOBase):
    """Some bytes of a file, as a file.

    Args:
        stream: of the file.
        start: first byte.
        length: number of bytes.
    """

    def __init__(self, stream: IO[bytes], start: int, length: int) -> None:
        self._stream, self._start, self._length = stream, start, length
        self._at = 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """Next byte."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a byte."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError("seeks before its begin")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read what there is, up to the end."""
        self._stream.seek(self._start + self._at)
        found = self._stream.read(max(0, min(len(buffer), self._length - self._at)))
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)


def read(file: Path, remedy: str) -> Any:
    """What a file holds, its tensors without data.

    Args:
        file: written by torch.save.
        remedy: what to do where it is missing or damaged.

    Raises:
        UserError: it is missing, damaged, or holds what could be a program.
    """
    try:
        with file.open("rb") as stream:
            return parse(stream)
    except FileNotFoundError:
        raise UserError(f"{file}: no such file; {remedy}") from None
    except pickle.UnpicklingError as error:
        reason = str(error).split("\n")[0]
        raise UserError(
            f"{file}: holds more than tensors and plain values, so it is not read ({reason}); "
            f"{remedy}"
        ) from None
    except zipfile.BadZipFile as error:
        raise UserError(
            f"{file}: damaged ({error}), or written by torch before 1.6; {remedy}, or let torch "
            "load it and save it again"
        ) from None
    # What a damaged pickle asks for can fail in any way.
    except Exception as error:
        reason = str(error).split("\n")[0] or type(error).__name__
        raise UserError(f"{file}: damaged ({reason}); {remedy}") from None


def parse(stream: Any) -> Any:
    """What `read` gives, of a stream; places are counted from its begin.

    Raises:
        pickle.UnpicklingError: it holds what could be a program.
        Exception: of any kind; it is damaged.
    """
    with zipfile.ZipFile(stream) as archive:
        entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
        if "byteorder" in entries and archive.read(entries["byteorder"]) != b"little":
            raise ValueError("its numbers are big-endian")

        def find(key: str) -> int:
            entry = entries[f"data/{key}"]
            if entry.compress_type:
                raise ValueError("its tensors are compressed")
            return data_offset(stream, entry)

        with archive.open(entries["data.pkl"]) as pickled:
            return _Unpickler(pickled, find).read()


def data_offset(stream: Any, entry: zipfile.ZipInfo) -> int:
    """First byte of an archive's entry.

    Raises:
        UserError: it is damaged.
    """
    stream.seek(entry.header_offset)
    header = stream.read(30)
    if header[:4] != _LOCAL:
        raise UserError(f"{stream.name}: damaged at byte {entry.header_offset}; write it again")
    name, extra = struct.unpack("<HH", header[26:30])
    found: int = entry.header_offset + 30 + name + extra
    return found
