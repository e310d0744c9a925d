"""Values that a distributed checkpoint of Megatron-LM keeps beside sharded tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokamake.checkpoint.megatron_model.rank_file import REMEDY
from tokamake.checkpoint.tensors.extents import Chunk
from tokamake.checkpoint.tensors.source import TensorSource
from tokamake.checkpoint.torch_files import dcp_archives, pickle_reader, torch_archive
from tokamake.checkpoint.torch_files.dcp_metadata import Contents, StorageLocation
from tokamake.checkpoint.torch_files.pickle_reader import PickledTensor
from tokamake.errors import UserError

FILE = "common.pt"
"""File of the common state. Megatron-LM since August 2026 keeps it in an archive instead."""
_KEY = "common_state/shard_0_1"


@dataclass(frozen=True)
class StoredObject:
    """An object of Python in a checkpoint, with `PickledTensor` in place of tensors."""

    value: Any
    file: Path
    offset: int = 0
    """First byte in the file of the archive that holds it."""

    def number(self, value: Any) -> float | None:
        """Return a number within the object, also if it is a tensor; None if it is neither."""
        if isinstance(value, int | float):
            return float(value)
        if not isinstance(value, PickledTensor) or value.numel != 1:
            return None
        extent = torch_archive.extent(self.file, "number", replace(value, shape=(), stride=()))
        extent = replace(extent, offset=self.offset + extent.offset, chunks=(Chunk("", ()),))
        return TensorSource([extent], {"": ()}).number("")


def read_common(folder: Path, contents: Contents) -> StoredObject:
    """Read the common state: Megatron's arguments, counters and settings of the optimizer."""
    if (file := folder / FILE).is_file() or _KEY not in contents.objects:
        common = StoredObject(pickle_reader.read(file, REMEDY), file)
    else:
        common = read_shard(folder, _KEY, location=contents.objects[_KEY])
    if not isinstance(common.value, Mapping):
        raise UserError(f"{common.file}: holds no state of a checkpoint; {REMEDY}")
    return common


def read_shard(folder: Path, key: str, *, location: StorageLocation) -> StoredObject:
    """Read an object that a single rank has saved."""
    file, offset, _ = location
    # Megatron saves a list with the single shard.
    shards = dcp_archives.read_object(folder, key, location=location)
    if not isinstance(shards, list) or len(shards) != 1:
        raise UserError(f"{folder / file}: damaged at {key}, which is not one object; {REMEDY}")
    return StoredObject(shards[0], folder / file, offset)
