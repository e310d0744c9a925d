"""Mixture of experts: a router chooses some of many MLPs, the experts, for each token.

After Switch (arXiv 2101.03961) and MegaBlocks (arXiv 2211.15841): tokens are sorted by expert, and
no token is dropped, however many choose the same expert, unless a training sets a capacity
(`expert_capacity`). Tensor-parallel ranks divide the width of each expert; all of them compute the
router. Expert-parallel ranks divide the experts: rows go to the ranks of their experts, and the
results come back (`parallel.expert_dispatch`).
Shape suffixes: B batch, L tokens of a row, N tokens of a micro batch, K experts of a token, R rows
(each token once for each expert that takes it), E experts, D hidden size, I width of an expert.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tokamake.config.architecture import Architecture
from tokamake.models.common.decoder import Decoder
from tokamake.models.common.expert_capacity import ExpertCapacity
from tokamake.models.common.gates import gated
from tokamake.models.common.key_value_cache import KeyValueCache, LayerCache
from tokamake.models.common.layers import GatedMLP, TransformerLayer
from tokamake.models.common.router_losses import RouterLosses, Routing
from tokamake.models.common.routers import Choices, Router, one_hot
from tokamake.parallel.attention import AttentionMask
from tokamake.parallel.axis import part
from tokamake.parallel.dropout import Dropout, dropped
from tokamake.parallel.expert_dispatch import ExpertDispatch
from tokamake.parallel.expert_rows import ExpertRows
from tokamake.parallel.grouped_linear import Groups, grouped_linear, groups_of
from tokamake.parallel.mesh import SINGLE_RANK, Mesh
from tokamake.parallel.placement import Placement
from tokamake.parallel.tensor import shared_input, summed_output
from tokamake.runtime.torch_internals import not_compiled


class ExpertLinear(nn.Module):
    """The same projection of this rank's experts: a stack of matrices, (E, outputs, inputs).

    Tensor-parallel ranks divide the dimension `dim` of the stack. A bias is a stack of vectors,
    (E, outputs). Where the ranks divide the inputs, each has all of it, and the first one adds it.
    """

    def __init__(self, *shape: int, dim: int, mesh: Mesh, bias: bool = False) -> None:
        super().__init__()
        num_experts, *of_expert = shape
        own = len(part(num_experts, mesh.expert))
        self.weight = nn.Parameter(torch.empty(own, *of_expert))
        is_divided = mesh.tensor.size > 1
        axes = (("expert", 0),) if mesh.expert.size > 1 else ()
        divided = Placement(dim if is_divided else None, axes=axes, hidden=True)
        self.placements = {"weight": divided}
        self.bias, self._adds_bias = None, True
        if bias:
            self.bias = nn.Parameter(torch.empty(own, of_expert[0]))
            of_bias = Placement(1 if is_divided else None, axes=axes, decays=False, hidden=False)
            if dim == 2:
                self._adds_bias = mesh.tensor.rank == 0
                of_bias = replace(of_bias, dim=None, partial=is_divided)
            self.placements["bias"] = of_bias

    bias: nn.Parameter | None

    def forward(self, x: Tensor, groups: Groups) -> Tensor:
        """Map rows, sorted by expert."""
        # A factor of 0 keeps the bias part of the backward pass on all ranks.
        bias = self.bias if self.bias is None or self._adds_bias else self.bias * 0
        return grouped_linear(x, self.weight, groups, bias)


class Experts(nn.Module):
    """Gated MLPs; tensor-parallel ranks divide their width, expert-parallel ranks their number."""

    def __init__(self, architecture: Architecture, mesh: Mesh) -> None:
        super().__init__()
        number, hidden = architecture.setting("num_experts"), architecture.hidden_size
        self._expert_axis = mesh.expert
        self._inner = inner = len(part(architecture.expert_size, mesh.tensor))
        self._gated, bias = gated(architecture), architecture.mlp_bias
        self.gate_proj = ExpertLinear(number, inner, hidden, dim=1, mesh=mesh, bias=bias)
        self.up_proj = ExpertLinear(number, inner, hidden, dim=1, mesh=mesh, bias=bias)
        self.down_proj = ExpertLinear(number, hidden, inner, dim=2, mesh=mesh, bias=bias)

    def forward(
        self,
        x_ND: Tensor,
        weights_NK: Tensor,
        *,
        chosen_NK: Tensor,
        counts_E: Tensor,
        is_kept_NK: Tensor | None = None,
    ) -> Tensor:
        """(N, D) sum of the results of each token's experts, times their weights.

        On several tensor-parallel ranks, a part of the sum. The host waits for the device at most
        once: for all numbers of rows together, or for none of them.

        Args:
            chosen_NK: int64 experts of each token.
            counts_E: int64 choices that each expert takes.
            is_kept_NK: False for choices that experts drop; None: they take all.
        """
        if self._expert_axis.size == 1:
            groups = groups_of(counts_E, x_ND, width=self._inner)
            num_rows = None
            if is_kept_NK is not None:
                num_rows = int(counts_E.sum()) if isinstance(groups, Tensor) else sum(groups)
            rows = ExpertRows(chosen_NK, is_kept_NK, num_rows=num_rows)
            x_RD, weights_R = rows.of_tokens(x_ND), rows.of_choices(weights_NK)
            return rows.summed(self._computed(x_RD, weights_R, groups))
        dispatch = ExpertDispatch(counts_E, self._expert_axis)
        rows = ExpertRows(chosen_NK, is_kept_NK, num_rows=dispatch.num_sent)
        x_RD = dispatch.to_experts(rows.of_tokens(x_ND))
        weights_R = dispatch.to_experts(rows.of_choices(weights_NK))
        groups = groups_of(dispatch.counts, x_RD, width=self._inner, lengths=dispatch.lengths)
        return rows.summed(dispatch.to_tokens(self._computed(x_RD, weights_R, groups)))

    def _computed(self, x_RD: Tensor, weights_R: Tensor, groups: Groups) -> Tensor:
        """Results of this rank's experts for rows that are sorted by expert."""
        inner_RI = self._gated(self.gate_proj(x_RD, groups), self.up_proj(x_RD, groups))
        has_bias = self.down_proj.bias is not None
        if not has_bias:  # before the product, where states are narrower than after it
            inner_RI = inner_RI * weights_R[:, None]
        y_RD: Tensor = self.down_proj(inner_RI, groups)
        return y_RD * weights_R[:, None] if has_bias else y_RD


class MixtureOfExperts(nn.Module):
    """A router and its experts, in place of an MLP.

    With `n_shared_experts`, all tokens also pass an MLP as wide as so many experts.

    Attributes:
        number: layer index in the whole model.
        losses: gets the choices of a training; None: nothing is measured.
        capacity: of a training; None: no choice is dropped, as in evaluation and generation.
    """

    def __init__(
        self,
        architecture: Architecture,
        mesh: Mesh = SINGLE_RANK,
        *,
        router: Callable[[Architecture, Mesh], Router] = Router,
    ) -> None:
        super().__init__()
        self.number, self.losses, self.capacity = 0, None, None
        self._mesh = mesh
        self.gate = router(architecture, mesh)
        self.experts = Experts(architecture, mesh)
        self.shared_experts = None
        if number := (architecture.model_extra or {}).get("n_shared_experts"):
            width = number * architecture.expert_size
            self.shared_experts = GatedMLP(architecture, mesh, width=width)

    losses: RouterLosses | None
    capacity: ExpertCapacity | None
    shared_experts: GatedMLP | None

    @not_compiled
    def forward(self, x_BLD: Tensor, is_token_BL: Tensor | None = None) -> Tensor:
        """Transform each token on its own.

        Args:
            is_token_BL: False where a row is filled up: such places count in no loss. None: all
                are tokens.
        """
        shared_BLD = None if self.shared_experts is None else self.shared_experts(x_BLD)
        x_BLD = shared_input(x_BLD, self._mesh)
        x_ND = x_BLD.flatten(0, 1)
        choices: Choices = self.gate(x_ND)
        weights_NK, chosen_NK = choices.weights_NK, choices.chosen_NK
        is_taken_NE = is_chosen_NE = one_hot(chosen_NK, like=choices.logits_NE)
        is_kept_NK = None
        if self.losses is not None and torch.is_grad_enabled():
            if self.capacity is not None:
                is_chosen_BLE = is_chosen_NE.unflatten(0, x_BLD.shape[:2])
                is_taken_NE = self.capacity.kept(is_chosen_BLE, is_token_BL).flatten(0, 1)
                is_kept_NK = is_taken_NE.gather(1, chosen_NK)
            routing = _routing(choices, is_chosen_NE, is_taken_NE, shape=x_BLD.shape[:2])
            routing = routing._replace(is_token_BL=is_token_BL)
            weights_NK = self.losses.added(weights_NK, routing, layer=self.number)
        counts_E = is_taken_NE.sum(0).long()
        y_ND = self.experts(
            x_ND,
            weights_NK.to(x_ND.dtype),
            chosen_NK=chosen_NK,
            counts_E=counts_E,
            is_kept_NK=is_kept_NK,
        )
        y_BLD = summed_output(y_ND.view_as(x_BLD), self._mesh)
        return y_BLD if shared_BLD is None else y_BLD + shared_BLD


def _routing(
    choices: Choices, is_chosen_NE: Tensor, is_taken_NE: Tensor, *, shape: torch.Size
) -> Routing:
    """Choices by rows, whose `shape` is (B, L)."""
    is_likely_NE = is_chosen_NE
    if choices.likeliest_NK is not choices.chosen_NK:
        is_likely_NE = one_hot(choices.likeliest_NK, like=choices.logits_NE)
    tensors = choices.logits_NE, choices.probabilities_NE, is_chosen_NE, is_likely_NE, is_taken_NE
    return Routing(*(each.unflatten(0, shape) for each in tensors))


class ExpertLayer(TransformerLayer):
    """A pre-norm layer of a model with experts; a dense one has a `GatedMLP`."""

    def forward(
        self,
        x_BLD: Tensor,
        cos_LK: Tensor | None,
        sin_LK: Tensor | None,
        mask: AttentionMask = None,
        dropout: Dropout | None = None,
        cache: LayerCache | None = None,
        is_token_BL: Tensor | None = None,
    ) -> Tensor:
        """Transform token states; see `Attention` and `MixtureOfExperts` for the arguments."""
        y_BLD: Tensor = self.self_attn(
            self.input_layernorm(x_BLD), cos_LK, sin_LK, mask, dropout, cache
        )
        x_BLD = x_BLD + dropped(y_BLD, dropout, "attention_output", layer=self.self_attn)
        inputs = () if isinstance(self.mlp, GatedMLP) else (is_token_BL,)
        y_BLD = self.mlp(self.post_attention_layernorm(x_BLD), *inputs)
        return x_BLD + dropped(y_BLD, dropout, "mlp_output", layer=self.self_attn)


class ExpertDecoder(Decoder):
    """A causal model whose layers have mixtures of experts; families derive from it.

    They have the literal `HAS_ROUTERS = True` and the settings `num_experts` and
    `num_experts_per_tok`. With `first_k_dense_replace`, the first layers have one MLP.

    Attributes:
        router: builds the router of a layer.
    """

    is_gated = True
    router: Callable[[Architecture, Mesh], Router] = Router

    def build_mlp(self) -> MixtureOfExperts:
        return MixtureOfExperts(self.architecture, self.mesh, router=self.router)

    def build_layer(self) -> ExpertLayer:
        return ExpertLayer(self.build_norm, self.build_attention(), mlp=self.build_mlp())

    def layer(self, number: int) -> ExpertLayer:
        if number in self.architecture.expert_layers:
            return self.build_layer()
        mlp = GatedMLP(self.architecture, self.mesh)
        return ExpertLayer(self.build_norm, self.build_attention(), mlp=mlp)

    def _mixtures(self) -> dict[int, MixtureOfExperts]:
        mlps = {int(number): layer.mlp for number, layer in self.layers.items()}
        return {n: mlp for n, mlp in mlps.items() if isinstance(mlp, MixtureOfExperts)}

    def add_layers(self, numbers: range) -> None:
        super().add_layers(numbers)
        for number, mlp in self._mixtures().items():
            mlp.number = number

    @property
    def experts(self) -> list[nn.Module]:
        """Modules whose parameters differ between expert-parallel ranks."""
        return [module for module in self.modules() if isinstance(module, Experts)]

    def watch_routers(self, losses: RouterLosses, *, capacity_factor: float | None = None) -> None:
        """Give `losses` the choices of all routers while the model trains.

        Args:
            capacity_factor: of experts while the model trains; None: they drop no choice.
        """
        number = self.architecture.setting("num_experts_per_tok")
        for mlp in self._mixtures().values():
            mlp.losses = losses
            if capacity_factor is not None:
                mlp.capacity = ExpertCapacity(capacity_factor, num_chosen=number, mesh=self.mesh)

    def through_layers(
        self,
        x_BLD: Tensor,
        *inputs: Any,
        cache: KeyValueCache | None = None,
        is_token: Tensor | None = None,
    ) -> Tensor:
        """Pass states through the layers of this stage.

        Args:
            is_token: (B, L) False where a row is filled up; None: all are tokens.
        """
        if cache is not None:
            return super().through_layers(x_BLD, *inputs, cache=cache)
        return super().through_layers(x_BLD, *inputs, None, is_token)
