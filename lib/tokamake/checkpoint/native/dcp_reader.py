"""Reader for torch's distributed checkpoint (DCP) that runs no code from `.metadata`.

DCP's own reader unpickles `.metadata` without any restriction.
"""

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from tokamake.checkpoint.native import dcp_metadata
from tokamake.checkpoint.native.dcp_metadata import WholeTensor


class DcpReader(dcp.FileSystemReader):
    """DCP's reader of a folder, with `.metadata` read by `dcp_metadata`."""

    def read_metadata(self) -> Metadata:
        """Return DCP's records of all tensors.

        Raises:
            UserError: as `dcp_metadata.read`.
        """
        tensors = dcp_metadata.read(Path(self.path))
        return Metadata(
            state_dict_metadata={key: _record(tensor) for key, tensor in tensors.items()},
            planner_data={key: (key,) for key in tensors},
            storage_data={
                MetadataIndex(key, torch.Size(chunk.offset), number): _StorageInfo(*chunk.location)
                for key, tensor in tensors.items()
                for number, chunk in enumerate(tensor.chunks)
                if chunk.location is not None
            },
            storage_meta=StorageMeta(load_id=self.load_id),
            version=dcp_metadata.VERSION,
        )


def _record(tensor: WholeTensor) -> TensorStorageMetadata:
    chunks = [
        ChunkStorageMetadata(torch.Size(chunk.offset), torch.Size(chunk.size))
        for chunk in tensor.chunks
    ]
    properties = TensorProperties(tensor.dtype.torch)
    return TensorStorageMetadata(properties, torch.Size(tensor.size), chunks)
