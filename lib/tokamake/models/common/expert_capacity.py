"""Capacity of experts: how many choices of a row an expert takes; it drops later ones.

With T tokens of a row, K experts a token, E experts and a factor, an expert takes the first
ceil(factor × T × K / E) tokens of the row that choose it, as GShard does (arXiv 2006.16668). Places
where a row is filled up are no tokens. Rows are counted apart, and ranks that share a row know the
counts of earlier chunks, so each layout drops the same. A token is kept or dropped by itself and
earlier tokens: an order by probability, Megatron's default, would let it see later ones.
Shape suffixes: B rows, L tokens of a row on this rank, C chunks of a row, E experts.
"""

from fractions import Fraction

from torch import Tensor

from tokamake.parallel.collectives import all_gather
from tokamake.parallel.context import in_order
from tokamake.parallel.mesh import SINGLE_RANK, Mesh


class ExpertCapacity:
    """Chooses which choices of a router its experts take."""

    def __init__(self, factor: float, *, num_chosen: int, mesh: Mesh = SINGLE_RANK) -> None:
        """Take the factor of an even share and the experts of a token."""
        # The decimal number: in binary, 1.1 × 10 is more than 11, and rounded up to 12. Products
        # with many digits would not fit int64.
        self._factor = Fraction(str(factor)).limit_denominator(10**6)
        self._num_chosen = num_chosen
        self._axis = mesh.context

    def kept(self, is_chosen_BLE: Tensor, is_token_BL: Tensor | None) -> Tensor:
        """(B, L, E) bool: choices that experts take; all context-parallel ranks call it together.

        Args:
            is_chosen_BLE: 1 for the experts of a token, else 0.
            is_token_BL: False where a row is filled up; None: all are tokens.
        """
        taken_BLE = is_chosen_BLE.long()
        if is_token_BL is not None:
            taken_BLE = taken_BLE * is_token_BL[..., None]
        places_BLE, totals_BE = self._places(taken_BLE)
        tokens_B1 = totals_BE.sum(1, keepdim=True) // self._num_chosen
        num_experts = is_chosen_BLE.shape[-1]
        above, below = self._factor.as_integer_ratio()
        share, whole = above * self._num_chosen, below * num_experts
        most_B1 = (tokens_B1 * share + whole - 1) // whole
        return taken_BLE.bool() & (places_BLE <= most_B1[..., None])

    def _places(self, taken_BLE: Tensor) -> tuple[Tensor, Tensor]:
        """Choices of each expert up to each token, itself included, and in the whole row (B, E)."""
        if self._axis.size == 1:
            places_BLE = taken_BLE.cumsum(1)
            return places_BLE, places_BLE[:, -1]
        chunks_B2LE = taken_BLE.unflatten(1, (2, -1))
        own_B12E = chunks_B2LE.sum(2)[:, None]
        of_chunks_BCE = in_order(all_gather(own_B12E, self._axis, dim=1), 1)
        until_BCE = of_chunks_BCE.cumsum(1)
        own = [self._axis.rank, 2 * self._axis.size - 1 - self._axis.rank]
        before_B2E = (until_BCE - of_chunks_BCE)[:, own]
        return (chunks_B2LE.cumsum(2) + before_B2E[:, :, None]).flatten(1, 2), until_BCE[:, -1]
