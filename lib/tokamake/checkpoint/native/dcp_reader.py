"""Reader for torch's distributed checkpoint (DCP) that runs no code and verifies checksums.

DCP's own reader unpickles `.metadata` without any restriction, and does not compare the data with
the CRC-32 in each archive.
"""

from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
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
from torch.futures import Future

from tokamake.checkpoint.native.archive_tensors import ArchiveTensors
from tokamake.checkpoint.torch_files import dcp_metadata, dcp_metadata_writer
from tokamake.checkpoint.torch_files.dcp_metadata import StorageLocation, WholeTensor
from tokamake.errors import UserError
from tokamake.runtime.torch_internals import narrowed, storage_info


class DcpReader(dcp.FileSystemReader):
    """DCP's reader of a folder, with `.metadata` read by `dcp_metadata`."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what this rank has planned to read."""
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
