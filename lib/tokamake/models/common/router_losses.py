"""Losses of the routers of mixtures of experts, and their measurements.

For a row with T tokens, E experts and K experts a token, a layer has the balance loss
E / K × Σ_e f_e P_e (arXiv 2101.03961; by rows as in arXiv 2412.19437) and the z loss, the mean of
the squared log-sum-exp of the scores (arXiv 2202.08906). f_e is the share of the T tokens that
choose expert e, P_e its mean probability. Both losses are means over the rows of the global batch;
layers add up; places where a row is filled up do not count. Ranks that share a row add up its f_e.
So every layout has the same losses. Gradients enter the backward pass in the layer: a pipeline
stage needs no losses but its own, and layers that are computed again count once.
Shape suffixes: B rows, L tokens of a row, E experts.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tokamake.models.common.added_loss import with_loss
from tokamake.parallel.collectives import all_reduce
from tokamake.parallel.mesh import SINGLE_RANK, Mesh

_NUM_SUMS = 4
"""Measured beside the tokens of each expert: balance, z, entropy and dropped choices."""


class Routing(NamedTuple):
    """Choices of a router for the rows of a micro batch; this rank's tokens of them."""

    logits_BLE: Tensor
    """Scores, fp32."""
    probabilities_BLE: Tensor
    """The scores as shares that add up to 1."""
    is_chosen_BLE: Tensor
    """1 for the experts of a token, else 0, fp32."""
    is_likely_BLE: Tensor
    """1 for its most probable experts, which the balance loss counts: mostly the same."""
    is_taken_BLE: Tensor
    """As `is_chosen_BLE`, without choices that experts drop."""
    is_token_BL: Tensor | None = None
    """False where a row is filled up; None: all are tokens."""


class LayerRouting(NamedTuple):
    """Measurements of a router, over the global batch."""

    layer: int
    """Index of its layer."""

    balance: float
    """The balance loss without its coefficient."""
    z: float
    """The z loss without its coefficient."""
    entropy: float
    """Mean entropy of a token's probabilities in nats."""
    counts: tuple[float, ...]
    """Tokens that choose each expert."""
    dropped: float = 0.0
    """Share of the choices that experts drop."""


class RouterLosses:
    """Losses of the routers of a rank's layers, and what they measure in a step.

    Attributes:
        factor: share of a row in the losses of the step: 1/rows of the global batch, times the
            scale of gradients. None: no losses enter the backward pass, and nothing is measured.
    """

    def __init__(
        self,
        *,
        balance: float,
        z: float,
        layers: range,
        num_experts: int,
        mesh: Mesh = SINGLE_RANK,
        device: torch.device,
    ) -> None:
        """Take the coefficients of both losses.

        Args:
            layers: indices of the layers with experts in the whole model.
        """
        self._coefficients, self._mesh = (balance, z), mesh
        self._layers, self._device = layers, device
        self._shape = len(layers), _NUM_SUMS + num_experts
        self._measured: dict[int, list[Tensor]] = {}
        self.factor: float | Tensor | None = None

    def added(self, weights: Tensor, routing: Routing, *, layer: int) -> Tensor:
        """Return the weights of chosen experts; their backward pass adds gradients of the losses.

        All context-parallel ranks call it together.
        """
        if self.factor is None:
            return weights
        logits, probabilities, is_chosen, is_likely, is_taken, is_token = routing
        mask_BL = torch.ones_like(logits[..., 0]) if is_token is None else is_token.float()
        counts_BE = (is_likely * mask_BL[..., None]).sum(1)
        if self._mesh.context.size > 1:
            counts_BE = all_reduce(counts_BE, self._mesh.context)
        num_experts = logits.shape[-1]
        num_chosen = weights.shape[-1]
        # A row that is all filled up has no tokens, and sums of 0.
        tokens_B = (counts_BE.sum(1) / num_chosen).clamp(min=1)
        sums_BE = (probabilities * mask_BL[..., None]).sum(1)
        # Linear in the probabilities: the parts of ranks that share a row add up.
        balance_B = (counts_BE * sums_BE).sum(1) * num_experts / num_chosen / tokens_B.square()
        z_B = (logits.logsumexp(-1).square() * mask_BL).sum(1) / tokens_B
        of_balance, of_z = self._coefficients
        loss = of_balance * balance_B.sum() + of_z * z_B.sum()
        with torch.no_grad():
            entropy_BL = torch.special.entr(probabilities).sum(-1)
            entropy_B = (entropy_BL * mask_BL).sum(1) / tokens_B
            own_E = (is_chosen * mask_BL[..., None]).sum((0, 1))
            taken = (is_taken * mask_BL[..., None]).sum()
            sums = balance_B.sum(), z_B.sum(), entropy_B.sum(), own_E.sum() - taken
            measured = torch.cat((torch.stack(sums), own_E))
        return with_loss(weights, loss, sums=self, number=layer, measured=measured)

    def gradient(self, number: int, measured: Tensor) -> Tensor:
        """Gradient of the losses of a micro batch; counts what a layer has measured there."""
        factor = self.factor
        if factor is None:
            return measured.new_zeros(())
        self._measured.setdefault(number, []).append(measured)
        # Tensor-parallel ranks compute the same losses, and add up gradients of scores and states.
        # A copy of a number of the host would wait for the device.
        return (measured.new_ones(()) * (factor / self._mesh.tensor.size)).float()

    def keep(self, number: int) -> None:
        """Drop measurements before the last `number` micro batches."""
        self._measured = {layer: of_layer[-number:] for layer, of_layer in self._measured.items()}

    def forget(self) -> None:
        """Drop the measurements so far."""
        self._measured.clear()

    def take(self) -> Tensor:
        """(layers × (4 + experts),) this rank's measurements since the last call.

        The sum over all ranks is the input of `read`.
        """
        sums = torch.zeros(self._shape, device=self._device)
        if self._mesh.tensor.rank == 0:  # tensor-parallel ranks measure the same
            for layer, measured in self._measured.items():
                sums[self._layers.index(layer)] = torch.stack(measured).sum(0)
        self.forget()
        return sums.flatten()

    @property
    def size(self) -> int:
        """Numbers of the result of `take`."""
        return math.prod(self._shape)

    def read(self, values: list[float], num_rows: int) -> tuple[LayerRouting, ...]:
        """Measurements of each layer, by their sums over all ranks and the rows of the step."""
        width, rows = self._shape[1], max(1, num_rows)
        of_layers = (values[start : start + width] for start in range(0, len(values), width))
        return tuple(
            LayerRouting(
                layer,
                balance / rows,
                z / rows,
                entropy / rows,
                tuple(counts),
                dropped / max(1.0, sum(counts)),
            )
            for layer, (balance, z, entropy, dropped, *counts) in zip(
                self._layers, of_layers, strict=True
            )
        )
