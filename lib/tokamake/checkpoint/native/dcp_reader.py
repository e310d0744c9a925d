"""Has torch's distributed checkpoint (DCP) load tensors of a folder, and run nothing that it reads.

DCP's own reader would unpickle `.metadata` whatever it is.
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
    """DCP's reader of a folder, with what `dcp_metadata` reads."""

    def read_metadata(self) -> Metadata:
        """DCP's records of all tensors.

        Raises:
            UserError: as `dcp_metadata.read`.
        """
        tensors = dcp_metadata.read(Path(self.path))
        return Metadata(
            state_dict_metadata={key: _described(tensor) for key, tensor in tensors.items()},
            planner_data={key: (key,) for key in tensors},
            storage_data={
                MetadataIndex(key, torch.Size(box.offset), number): _StorageInfo(*box.place)
                for key, tensor in tensors.items()
                for number, box in enumerate(tensor.boxes)
                if box.place is not None
            },
            storage_meta=StorageMeta(load_id=self.load_id),
            version=dcp_metadata.VERSION,
        )


def _described(tensor: WholeTensor) -> TensorStorageMetadata:
    chunks = [
        ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.size)) for box in tensor.boxes
    ]
    properties = TensorProperties(tensor.dtype.torch)
    return TensorStorageMetadata(properties, torch.Size(tensor.size), chunks)
