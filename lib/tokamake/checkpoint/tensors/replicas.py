"""Compare replicated tensors, such as norms, between the ranks of a checkpoint."""

import math
from contextlib import ExitStack

from tokamake.checkpoint.tensors import chunks
from tokamake.checkpoint.tensors.chunks import ChunkReader, OpenFiles
from tokamake.checkpoint.tensors.extents import FileChunk, Slices
from tokamake.checkpoint.tensors.source import TensorSource
from tokamake.errors import UserError


def check_replicas(source: TensorSource) -> None:
    """Compare all replicas bit by bit; nothing else is read."""
    for extent in source.extents:
        if not extent.is_replica:
            continue
        for chunk in extent.chunks:
            if not chunk.is_mean and not _is_same(source, (extent, chunk)):
                raise UserError(
                    f"{extent.file}: replicated tensor {extent.name} differs from that of other "
                    "ranks; use another checkpoint, or convert it with --take-first-copy"
                )


def _is_same(source: TensorSource, replica: FileChunk) -> bool:
    extent, chunk = replica
    if extent.dtype != source.dtype(chunk.key):
        return False
    map_once = any(
        chunks.is_transposed(each) for _, each in (replica, *source.file_chunks(chunk.key))
    )
    with ExitStack() as stack:
        files = OpenFiles(stack)
        whole_reader = ChunkReader.for_tensor(source, chunk.key, files=files, map_once=map_once)
        replica_reader = ChunkReader(files, [replica], dtype=extent.dtype, map_once=map_once)
        return same_bits(
            whole_reader, replica_reader, slices=chunk.slices, itemsize=extent.dtype.itemsize
        )


def same_bits(first: ChunkReader, second: ChunkReader, *, slices: Slices, itemsize: int) -> bool:
    """Whether slices of two tensors have the same bits. Some rows are compared at a time."""
    order = (*range(len(slices)),)
    row_bytes = math.prod(chunks.size(slices[1:])) * itemsize
    return all(
        first.read(slab, order).tobytes() == second.read(slab, order).tobytes()
        for slab in chunks.slabs(slices, order, row_bytes=row_bytes)
    )
