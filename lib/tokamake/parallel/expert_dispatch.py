"""Expert parallelism: rows go to the ranks that hold their experts, and the results come back.

Each rank has an equal number of consecutive experts, and rows of its own tokens. An all-to-all
exchanges as many rows as there are: none is dropped or filled up. An expert gets rows in the order
of ranks, and of tokens within a rank, so that results repeat bit for bit. The backward pass is the
same exchange in the other direction: the gradient of an expert's weights has the tokens of all
ranks, and no factor. After GShard (arXiv 2006.16668) and Megatron Core MoE (arXiv 2504.14960).
Shape suffixes: R rows, E experts, P expert-parallel ranks.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tokamake.parallel.axis import Axis


class ExpertDispatch:
    """The way of a micro batch's rows through a layer; all ranks of the axis make one together.

    Attributes:
        counts: int64 rows of each of this rank's experts, from all ranks.
        lengths: the same numbers on the host.
        num_sent: rows of this rank, for all experts.
    """

    counts: Tensor

    def __init__(self, counts_E: Tensor, axis: Axis) -> None:
        """Exchange the numbers of rows. It waits for the device once, which has them.

        Args:
            counts_E: (E,) int64 rows that this rank has for each expert.
        """
        self._axis = axis
        sent_PE = counts_E.view(axis.size, -1)
        received_PE = torch.empty_like(sent_PE)
        axis.sends(sent_PE)
        dist.all_to_all_single(received_PE, sent_PE, group=axis.group)
        axis.received(received_PE)
        self.counts = received_PE.sum(0)
        numbers: list[int] = torch.cat((sent_PE.sum(1), received_PE.sum(1), self.counts)).tolist()
        self._sent, self._received = numbers[: axis.size], numbers[axis.size : 2 * axis.size]
        self.lengths, self.num_sent = numbers[2 * axis.size :], sum(self._sent)
        # Rows arrive by rank, then by expert.
        experts = torch.arange(sent_PE.shape[1], device=counts_E.device).repeat(axis.size)
        expert_R = experts.repeat_interleave(received_PE.flatten(), output_size=sum(self._received))
        self._order_R = expert_R.argsort(stable=True)
        self._places_R = torch.empty_like(self._order_R)
        self._places_R[self._order_R] = torch.arange(len(expert_R), device=counts_E.device)

    def to_experts(self, x: Tensor) -> Tensor:
        """Send (R, ...) rows, sorted by expert; return the rows of this rank's experts, sorted."""
        received: Tensor = _Exchanged.apply(x, self._sent, self._received, self._axis)
        return permuted(received, self._order_R, self._places_R)

    def to_tokens(self, y: Tensor) -> Tensor:
        """Undo `to_experts`: send the results back to the ranks of their tokens."""
        by_rank = permuted(y, self._places_R, self._order_R)
        result: Tensor = _Exchanged.apply(by_rank, self._received, self._sent, self._axis)
        return result


def permuted(x: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:
    """Rows in another order; unlike torch's indexing, the backward pass adds up nothing."""
    result: Tensor = _Permuted.apply(x, order_R, inverse_R)
    return result


def _exchange(x: Tensor, axis: Axis, *, sent: list[int], received: list[int]) -> Tensor:
    result = x.new_empty(sum(received), *x.shape[1:])
    axis.sends(x)
    dist.all_to_all_single(result, x.contiguous(), received, sent, group=axis.group)
    axis.received(result)
    return result


class _Permuted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_R)
        return x[order_R]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient[ctx.saved_tensors[0]], None, None


class _Exchanged(torch.autograd.Function):
    """An all-to-all of rows; gradients travel back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], axis: Axis) -> Tensor:
        ctx.sent, ctx.received, ctx.axis = sent, received, axis
        return _exchange(x, axis, sent=sent, received=received)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        back = _exchange(gradient, ctx.axis, sent=ctx.received, received=ctx.sent)
        return back, None, None, None
