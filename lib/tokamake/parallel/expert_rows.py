"""Rows of tokens, sorted by the experts that they choose, and sums of the results.

Gradients add up in a fixed order: they repeat bit for bit.
Shape suffixes: N tokens, K experts of a token, R rows (each token once for each expert that takes
it), E experts.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


class ExpertRows:
    """The rows of some tokens."""

    def __init__(
        self, chosen_NK: Tensor, is_kept_NK: Tensor | None = None, *, num_rows: int | None = None
    ) -> None:
        """Sort the choices of tokens.

        Args:
            chosen_NK: int64 experts of each token.
            is_kept_NK: False for choices that are dropped; None: all have rows.
            num_rows: choices that are kept; None: all.
        """
        keys = chosen_NK.flatten()
        if is_kept_NK is None:
            self._order_R = keys.argsort(stable=True)
            places = torch.empty_like(keys)
        else:  # the last number is of no row
            keys = keys.masked_fill(~is_kept_NK.flatten(), torch.iinfo(keys.dtype).max)
            self._order_R = keys.argsort(stable=True)[:num_rows]
            places = torch.full_like(keys, len(self._order_R))
        places[self._order_R] = torch.arange(len(self._order_R), device=keys.device)
        self._places_NK = places.view_as(chosen_NK)
        self._has_dropped = is_kept_NK is not None

    def of_tokens(self, x: Tensor) -> Tensor:
        """(R, ...) a copy of its token (N, ...) for each row."""
        token_R = self._order_R // self._places_NK.shape[1]
        result: Tensor = _Copied.apply(x, token_R, self._places_NK, self._has_dropped)
        return result

    def of_choices(self, weights_NK: Tensor) -> Tensor:
        """(R,) the weight of each row."""
        places_N1 = self._places_NK.view(-1, 1)
        weights_N1 = weights_NK.reshape(-1, 1)
        result: Tensor = _Copied.apply(weights_N1, self._order_R, places_N1, self._has_dropped)
        return result[:, 0]

    def summed(self, y_RD: Tensor) -> Tensor:
        """(N, D) sum of the rows of each token; 0 for a token without rows."""
        token_R = self._order_R // self._places_NK.shape[1]
        result: Tensor = _Summed.apply(y_RD, token_R, self._places_NK, self._has_dropped)
        return result


def _sums(y_RD: Tensor, places_NK: Tensor, *, has_dropped: bool) -> Tensor:
    """Sums of rows in the order of a token's experts; the place after the last row is no row."""
    if places_NK.shape[1] == 1 and not has_dropped:
        return y_RD[places_NK[:, 0]]
    if has_dropped:
        y_RD = torch.cat((y_RD, y_RD.new_zeros(1, y_RD.shape[1])))
    # One kernel; sums of bf16 are rounded once.
    return F.embedding_bag(places_NK, y_RD, mode="sum")


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, token_R: Tensor, places_NK: Tensor, has_dropped: bool
    ) -> Tensor:
        ctx.save_for_backward(places_NK)
        ctx.has_dropped = has_dropped
        return x_ND[token_R]

    @staticmethod
    def backward(ctx: Any, gradient_RD: Tensor) -> tuple[Tensor, None, None, None]:
        (places_NK,) = ctx.saved_tensors
        return _sums(gradient_RD, places_NK, has_dropped=ctx.has_dropped), None, None, None


class _Summed(torch.autograd.Function):
    """The inverse of `_Copied`: its backward pass is the forward pass of the other."""

    @staticmethod
    def forward(
        ctx: Any, y_RD: Tensor, token_R: Tensor, places_NK: Tensor, has_dropped: bool
    ) -> Tensor:
        ctx.save_for_backward(token_R)
        return _sums(y_RD, places_NK, has_dropped=has_dropped)

    @staticmethod
    def backward(ctx: Any, gradient_ND: Tensor) -> tuple[Tensor, None, None, None]:
        return gradient_ND[ctx.saved_tensors[0]], None, None, None
