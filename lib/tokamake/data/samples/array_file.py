"""`arrays.bin`: the sample indexes of all datasets of a split in one file.

`blend_index` writes the arrays and puts their offsets into index.json. `loader` maps the file into
memory. Thousands of ranks open splits of thousands of datasets at the same time: a parallel file
system can serve one file for each split, but not three for each dataset.
"""

import math
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
import numpy.typing as npt

from tokamake import _csrc
from tokamake.data.samples.index_folder import REMEDY
from tokamake.data.samples.sample_index import DatasetIndex
from tokamake.data.samples.sentence_index import SentenceIndex
from tokamake.errors import UserError

Index = TypeVar("Index", DatasetIndex, SentenceIndex)

NAME = "arrays.bin"
_ALIGNMENT = 64  # bytes of a cache line; also enough for every dtype


def write_arrays(stream: IO[bytes], index: DatasetIndex | SentenceIndex) -> dict[str, list[Any]]:
    """Append arrays in little-endian byte order; return the offset, dtype and shape of each."""
    locations = {}
    for name, array in index._asdict().items():
        stream.write(bytes(-stream.tell() % _ALIGNMENT))
        locations[name] = [stream.tell(), array.dtype.newbyteorder("<").str, list(array.shape)]
        stream.write(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).data)
    return locations


class ArrayFile:
    """Memory-mapped arrays of a split."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        try:
            self._bytes = _csrc.map_file(self._path)
        except FileNotFoundError:
            raise UserError(f"{self._path}: no such file; {REMEDY}") from None

    def index(self, locations: dict[str, list[Any]], kind: type[Index]) -> Index:
        """Return the arrays of a dataset at the locations from `write_arrays`."""
        return kind(*(self._array(locations[name]) for name in kind._fields))

    def _array(self, location: list[Any]) -> npt.NDArray[Any]:
        offset, dtype, shape = location
        end = offset + np.dtype(dtype).itemsize * math.prod(shape)
        if end > len(self._bytes):
            raise UserError(f"{self._path}: damaged (ends before byte {end:,}); {REMEDY}")
        return self._bytes[offset:end].view(dtype).reshape(shape)
