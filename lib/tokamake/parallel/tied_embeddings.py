"""Gradients of an embedding and its copy, the output layer, in two pipeline stages."""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from tokamake.parallel.axis import Axis
from tokamake.parallel.sharding import ParameterChunk, gradient_of


def add_up_copies(
    chunks: Iterable[ParameterChunk],
    axis: Axis,
    *,
    name: str,
    gradient: Callable[[ParameterChunk], Tensor | None] = gradient_of,
) -> None:
    """Sum the gradients of an embedding and its copy in the last stage; both get the sum."""
    both = [gradient(each) for each in chunks if each.is_tied_output or each.name == name]
    gradients = [each for each in both if each is not None]
    if axis.size == 1 or not gradients:
        return
    if len(gradients) == 2:
        gradients[0].add_(gradients[1])
        gradients[1].copy_(gradients[0])
        return
    (own,) = gradients
    assert axis.group is not None
    other = axis.size - 1 if axis.rank == 0 else 0
    peer, theirs = dist.get_global_rank(axis.group, other), torch.empty_like(own)
    operations = [
        dist.P2POp(dist.isend, own.contiguous(), peer, axis.group),
        dist.P2POp(dist.irecv, theirs, peer, axis.group),
    ]
    for request in dist.batch_isend_irecv(operations):
        request.wait()
    own.add_(theirs)  # a + b has the bits of b + a, so both copies stay equal
