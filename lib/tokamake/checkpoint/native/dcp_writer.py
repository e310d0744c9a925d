"""Writer for torch's distributed checkpoint (DCP) with a reproducible `.metadata`.

DCP's own writer pickles `.metadata` differently in each version of Python (enum members, paths, the
protocol), and adds the folder's path and a random number.
"""

from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult

from tokamake.checkpoint.native.folder import seal
from tokamake.checkpoint.tensors import dtypes
from tokamake.checkpoint.torch_files import dcp_metadata_writer
from tokamake.checkpoint.torch_files.dcp_metadata import StorageLocation, StoredChunk, WholeTensor


class DcpWriter(dcp.FileSystemWriter):
    """DCP's writer to a folder, with `.metadata` written by `dcp_metadata_writer`."""

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write `.metadata` and hashes. One rank calls it, after all ranks have written tensors."""
        locations = {
            (result.index.fqn, result.index.offset): result.storage_data
            for rank_results in results
            for result in rank_results
        }
        tensors = {
            key: _whole_tensor(key, record, locations=locations)
            for key, record in metadata.state_dict_metadata.items()
        }
        dcp_metadata_writer.write(Path(self.path), tensors)
        seal(Path(self.path))


def _whole_tensor(key: str, record: Any, *, locations: dict[Any, Any]) -> WholeTensor:
    assert isinstance(record, TensorStorageMetadata), "tokamake saves tensors only"
    chunks = []
    for chunk in record.chunks:
        info = locations[key, chunk.offsets]
        location = StorageLocation(info.relative_path, info.offset, info.length)
        chunks.append(StoredChunk(tuple(chunk.offsets), tuple(chunk.sizes), location))
    return WholeTensor(tuple(record.size), dtypes.of(record.properties.dtype), tuple(chunks))
