"""Many arrays in one file: those of all files of a set, each at an offset that index.json knows.

`one_set` writes them, `loader` maps them into memory. Thousands of ranks open a set of thousands of
files at once: one file to open, not three for each, is what a parallel file system can bear.
"""

import math
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from tokamake import _csrc
from tokamake.data.samples.dataset_index import DatasetIndex
from tokamake.data.samples.index_folder import REMEDY
from tokamake.errors import UserError

NAME = "arrays.bin"
_ALIGNMENT = 64


def write_arrays(stream: IO[bytes], index: DatasetIndex) -> dict[str, list[Any]]:
    """Append the arrays of a file, little-endian.

    Returns:
        Offset in bytes, dtype and shape of each.
    """
    places = {}
    for name, array in index._asdict().items():
        stream.write(bytes(-stream.tell() % _ALIGNMENT))
        places[name] = [stream.tell(), array.dtype.newbyteorder("<").str, list(array.shape)]
        stream.write(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).data)
    return places


class Arrays:
    """The arrays of a set, mapped into memory.

    Args:
        folder: of the set.

    Raises:
        UserError: the file is missing.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        try:
            self._bytes = _csrc.map_file(self._path)
        except FileNotFoundError:
            raise UserError(f"{self._path}: no such file; {REMEDY}") from None

    def index(self, places: dict[str, list[Any]]) -> DatasetIndex:
        """The arrays of a file, by the places that `write_arrays` gave.

        Raises:
            UserError: the file ends before them.
        """
        return DatasetIndex(*(self._array(*places[name]) for name in DatasetIndex._fields))

    def _array(self, offset: int, dtype: str, shape: list[int]) -> npt.NDArray[Any]:
        end = offset + np.dtype(dtype).itemsize * math.prod(shape)
        if end > len(self._bytes):
            raise UserError(f"{self._path}: damaged (ends before byte {end:,}); {REMEDY}")
        return self._bytes[offset:end].view(dtype).reshape(shape)
