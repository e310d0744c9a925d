"""What ranks of a checkpoint have alike, such as norms: `inspect` and `convert` see that it is."""

import math
from contextlib import ExitStack

from tokamake.checkpoint.tensors import chunks
from tokamake.checkpoint.tensors.chunks import Box, ChunkReader, OpenFiles, Part
from tokamake.checkpoint.tensors.extents import TensorSource
from tokamake.errors import UserError


def check_copies(source: TensorSource) -> None:
    """Compare what several ranks have alike, bit by bit; nothing else is read.

    Raises:
        UserError: a copy differs; the message names it and its file.
    """
    for region in source.regions:
        for block in region.blocks if region.is_copy else ():
            if not block.is_mean and not _is_alike(source, (region, block)):
                raise UserError(
                    f"{region.file}: tensor {region.name} differs from that of other ranks, which "
                    "have it alike; take another checkpoint, or convert it with --take-first-copy"
                )


def _is_alike(source: TensorSource, copy: Part) -> bool:
    region, block = copy
    if region.dtype != source.dtype(block.key):
        return False
    across = any(chunks.turns(own) for _, own in (copy, *source.parts(block.key)))
    with ExitStack() as stack:
        files = OpenFiles(stack)
        whole = ChunkReader.of(source, block.key, files, across=across)
        own = ChunkReader(files, [copy], region.dtype, across=across)
        return same_bits(whole, own, block.place, region.dtype.itemsize)


def same_bits(one: ChunkReader, other: ChunkReader, place: Box, itemsize: int) -> bool:
    """Whether a box of two tensors has the same bits; some rows are compared at a time."""
    order = (*range(len(place)),)
    row_bytes = math.prod(chunks.size(place[1:])) * itemsize
    return all(
        one.read(slab, order).tobytes() == other.read(slab, order).tobytes()
        for slab in chunks.slabs(place, order, row_bytes)
    )
