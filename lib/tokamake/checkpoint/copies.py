"""What ranks of a checkpoint have alike, such as norms: `inspect` and `convert` see that it is."""

from collections import defaultdict
from typing import TYPE_CHECKING

from tokamake.checkpoint.regions import Block, Region, Source
from tokamake.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor


def check_copies(source: Source) -> None:
    """Compare what several ranks have alike, bit by bit; nothing else is read.

    Raises:
        UserError: a copy differs; the message names it and its file.
    """
    copies: dict[str, list[tuple[Region, Block]]] = defaultdict(list)
    for region in source.regions:
        for block in region.blocks if region.is_copy else ():
            if not block.is_mean:
                copies[block.key].append((region, block))
    for key, some in copies.items():
        whole = source.read(key)
        for region, block in some:
            own, other = block.view(region.map()), whole[block.place]
            if own.dtype != other.dtype or not _bits(own).equal(_bits(other)):
                raise UserError(
                    f"{region.file}: tensor {region.name} differs from that of other ranks, which "
                    "have it alike; take another checkpoint, or convert it with --take-first-copy"
                )


def _bits(box: "Tensor") -> "Tensor":
    import torch

    return box.reshape(-1).view(torch.uint8)
