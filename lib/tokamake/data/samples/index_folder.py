"""The index folder on disk: index.json and a folder of arrays for each split.

`index` writes it. The loader, `resolve` and `train` read it. `arrays.bin` has the sample indexes of
all datasets of a split: thousands of ranks open thousands of datasets at the same time, and a
parallel file system can serve one file for each split, but not three for each dataset.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
import numpy.typing as npt

from tokamake import _csrc, files
from tokamake.data.indexed.manifest import differs_from_manifest, find_manifest
from tokamake.data.indexed.paths import bin_path, idx_path
from tokamake.errors import UserError

Index = TypeVar("Index")

VERSION = 2
ARRAYS = "arrays.bin"
_ALIGNMENT = 64  # bytes of a cache line; also enough for every dtype
REMEDY = "run `tokamake index` again, or its rule in the workflow"


def read_index(folder: Path) -> dict[str, Any]:
    """Read index.json of an index folder."""
    path = folder / "index.json"
    description = files.read_json(path, REMEDY)
    if not isinstance(description, dict) or description.get("version") != VERSION:
        raise UserError(f"{path}: not an index of version {VERSION}; {REMEDY}")
    content = {key: value for key, value in description.items() if key != "digest"}
    if files.digest(content) != description.get("digest"):
        raise UserError(f"{path}: does not match its own digest; {REMEDY}")
    return description


def is_complete(folder: Path, request: str) -> bool:
    """Return whether a folder holds all files, in full size, of the request with this digest."""
    try:
        description = read_index(folder)
    except UserError:
        return False
    return description["request"] == request and damaged_file(folder, description) is None


def damaged_file(folder: Path, description: dict[str, Any]) -> Path | None:
    """First file of an index folder that is missing or has another size; None: there is none.

    Sizes, not hashes: this check must be fast for large indexes. `train` compares the hashes.
    """
    sizes_of = {folder / name: size for name, size in description["bytes"].items()}
    return next(
        (p for p, size in sizes_of.items() if not p.is_file() or p.stat().st_size != size), None
    )


def existing_splits(folder: Path) -> list[str]:
    """Names of all splits in a folder, also of splits that index.json does not describe."""
    return [path.parent.name for path in folder.glob("*/dataset_index.npy")]


def sizes(folder: Path) -> dict[str, int]:
    """Sizes in bytes of all files below a folder, by relative path, sorted."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths}


def identity(data_root: Path, prefix: str, *, thorough: bool = False) -> dict[str, Any]:
    """Identity of a dataset: sizes in bytes and hashes.

    The hashes come from the manifest. Without a manifest, the .idx file is hashed. `thorough` also
    checks the files that decide the samples: with a manifest it compares the .idx file with it,
    without one it hashes the .bin file.
    """
    dataset = data_root / prefix
    measured: dict[str, Any] = {"bytes": {}, "sha256": {}}
    for kind, path in (("bin", bin_path(dataset)), ("idx", idx_path(dataset))):
        try:
            measured["bytes"][kind] = path.stat().st_size
        except OSError:
            raise UserError(
                f"{path}: no such file; check the prefix, and the data root {data_root}"
            ) from None
    manifest = find_manifest(dataset)
    if manifest is None:
        measured["sha256"]["idx"] = files.sha256(idx_path(dataset))
        return measured | ({"content": files.sha256(bin_path(dataset))} if thorough else {})
    if any(manifest["bytes"][kind] != size for kind, size in measured["bytes"].items()) or (
        thorough and differs_from_manifest(dataset, manifest, name="idx")
    ):
        raise UserError(f"{dataset}: files do not match the manifest; write the dataset again")
    return measured | {"sha256": manifest["sha256"]}


def matches(indexed: dict[str, Any], measured: dict[str, Any]) -> bool:
    """Return whether an identity agrees with the index.

    Compares the measured keys only: the index may hold more, from a thorough measurement.
    """
    return all(indexed.get(key) == value for key, value in measured.items())


def open_array(path: Path) -> npt.NDArray[Any]:
    """Map an array of an index folder into memory; UserError: it is missing or damaged."""
    try:
        # A plain array: slicing an np.memmap costs a microsecond more.
        return np.asarray(np.load(path, mmap_mode="r"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; {REMEDY}") from None
    except Exception as error:  # a damaged header can raise anything
        raise UserError(f"{path}: damaged ({error}); {REMEDY}") from None


def write_arrays(stream: IO[bytes], arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, list[Any]]:
    """Append arrays in little-endian byte order; return the offset, dtype and shape of each."""
    locations = {}
    for name, array in arrays.items():
        stream.write(bytes(-stream.tell() % _ALIGNMENT))
        locations[name] = [stream.tell(), array.dtype.newbyteorder("<").str, list(array.shape)]
        stream.write(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).data)
    return locations


class ArrayFile:
    """Memory-mapped arrays of a split."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / ARRAYS
        try:
            self._bytes = _csrc.map_file(self._path)
        except FileNotFoundError:
            raise UserError(f"{self._path}: no such file; {REMEDY}") from None

    def index(self, locations: dict[str, list[Any]], kind: Callable[..., Index]) -> Index:
        """Return the arrays of a dataset at the locations from `write_arrays`."""
        return kind(**{name: self._array(location) for name, location in locations.items()})

    def _array(self, location: list[Any]) -> npt.NDArray[Any]:
        offset, dtype, shape = location
        end = offset + np.dtype(dtype).itemsize * math.prod(shape)
        if end > len(self._bytes):
            raise UserError(f"{self._path}: damaged (ends before byte {end:,}); {REMEDY}")
        return self._bytes[offset:end].view(dtype).reshape(shape)
