"""Has torch's distributed checkpoint (DCP) write tensors to a folder, with our own `.metadata`.

DCP's writer pickles `.metadata` as the Python at hand does: enum members, paths and the protocol
differ between versions, and it adds the folder's path and a random number.
"""

from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult

from tokamake.checkpoint.native import dcp_metadata
from tokamake.checkpoint.native.dcp_metadata import StorageLocation, StoredChunk, WholeTensor
from tokamake.checkpoint.tensors import dtypes


class DcpWriter(dcp.FileSystemWriter):
    """DCP's writer to a folder, with what `dcp_metadata` writes."""

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write where the tensors are; one rank calls it, after all have written."""
        places = {
            (result.index.fqn, result.index.offset): result.storage_data
            for of_rank in results
            for result in of_rank
        }
        tensors = {
            key: _whole(key, tensor, places) for key, tensor in metadata.state_dict_metadata.items()
        }
        dcp_metadata.write(Path(self.path), tensors)


def _whole(key: str, tensor: Any, places: dict[Any, Any]) -> WholeTensor:
    assert isinstance(tensor, TensorStorageMetadata), "checkpoints hold tensors alone"
    boxes = []
    for chunk in tensor.chunks:
        info = places[key, chunk.offsets]
        place = StorageLocation(info.relative_path, info.offset, info.length)
        boxes.append(StoredChunk(tuple(chunk.offsets), tuple(chunk.sizes), place))
    return WholeTensor(tuple(tensor.size), dtypes.of(tensor.properties.dtype), tuple(boxes))
