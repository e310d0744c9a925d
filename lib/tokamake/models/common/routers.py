"""Routers of mixtures of experts: they choose some experts for each token.

Shape suffixes: N tokens, K experts of a token, E experts, G groups of experts, D hidden size.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tokamake.config.architecture import Architecture
from tokamake.parallel.linear import linear
from tokamake.parallel.mesh import Mesh
from tokamake.parallel.placement import Placement

_LEAST_SUM = 1e-20
"""Added to the sum of a token's sigmoids, against a division by zero, as transformers does."""


class Choices(NamedTuple):
    """Experts that a router chooses for tokens."""

    logits_NE: Tensor
    """Scores, fp32."""
    probabilities_NE: Tensor
    """The scores as shares that add up to 1."""
    weights_NK: Tensor
    """Factors of the results of the chosen experts, fp32."""
    chosen_NK: Tensor
    """Numbers of the chosen experts, int64."""
    likeliest_NK: Tensor
    """Numbers of the most probable experts, which the balance loss counts: without groups and
    biases, the chosen ones."""


class Router(nn.Module):
    """The most probable experts by a softmax of scores; each tensor-parallel rank computes all.

    With `n_group`, experts come in groups, and only experts of the `topk_group` groups with the
    most probable expert are chosen (DeepSeek-V2, arXiv 2405.04434). `norm_topk_prob` scales the
    weights of a token so that they add up to 1, `routed_scaling_factor` all of them. With
    `mlp_bias`, scores have biases, which are trained.
    """

    def __init__(self, architecture: Architecture, mesh: Mesh) -> None:
        super().__init__()
        shape = architecture.setting("num_experts"), architecture.hidden_size
        self.weight = nn.Parameter(torch.empty(shape))
        # A rank has its part of the experts' width, so the gradient of a score is partial.
        partial = Placement(partial=mesh.tensor.size > 1)
        self.placements = {"weight": partial, "bias": partial}
        self.bias = nn.Parameter(torch.empty(shape[0])) if architecture.mlp_bias else None
        own = architecture.model_extra or {}
        self._num_chosen: int = own["num_experts_per_tok"]
        self._renormalizes: bool = own.get("norm_topk_prob", False)
        self._scale: float = own.get("routed_scaling_factor", 1.0)
        self._groups: tuple[int, int] = own.get("n_group", 1), own.get("topk_group", 1)

    bias: nn.Parameter | None

    def forward(self, x_ND: Tensor) -> Choices:
        """Choose experts."""
        logits_NE = linear(x_ND, self.weight, self.bias).float()
        probabilities_NE = logits_NE.softmax(-1)
        likeliest_NK = None
        if self._groups[0] > 1:
            likeliest_NK = probabilities_NE.topk(self._num_chosen)[1]
            kept_NE = in_best_groups(probabilities_NE, self._groups, score=_highest)
            weights_NK, chosen_NK = (probabilities_NE * kept_NE).topk(self._num_chosen)
        else:
            weights_NK, chosen_NK = probabilities_NE.topk(self._num_chosen)
        if self._renormalizes:
            weights_NK = weights_NK / weights_NK.sum(-1, keepdim=True)
        if self._scale != 1.0:
            weights_NK = weights_NK * self._scale
        likeliest_NK = chosen_NK if likeliest_NK is None else likeliest_NK
        return Choices(logits_NE, probabilities_NE, weights_NK, chosen_NK, likeliest_NK)


class BalancedRouter(Router):
    """Sigmoids of scores; a bias without a gradient balances the experts (DeepSeek-V3).

    arXiv 2412.19437, section 2.1.2: the bias counts in the choice, not in the weights. The score of
    a group is the sum of its two highest ones. Products and bias are fp32 at every precision.
    """

    def __init__(self, architecture: Architecture, mesh: Mesh) -> None:
        super().__init__(architecture, mesh)
        bias = torch.empty(architecture.setting("num_experts"), dtype=torch.float32)
        self.register_buffer("e_score_correction_bias", bias)

    e_score_correction_bias: Tensor

    def forward(self, x_ND: Tensor) -> Choices:
        """Choose experts."""
        logits_NE = linear(x_ND.float(), self.weight.float())
        scores_NE = logits_NE.sigmoid()
        with torch.no_grad():
            biased_NE = scores_NE + self.e_score_correction_bias
            if self._groups[0] > 1:
                kept_NE = in_best_groups(biased_NE, self._groups, score=_sum_of_two)
                biased_NE = biased_NE.masked_fill(~kept_NE, -torch.inf)
            chosen_NK = biased_NE.topk(self._num_chosen)[1]
            likeliest_NK = scores_NE.topk(self._num_chosen)[1]
        weights_NK = scores_NE.gather(1, chosen_NK)
        if self._renormalizes:
            weights_NK = weights_NK / (weights_NK.sum(-1, keepdim=True) + _LEAST_SUM)
        weights_NK = weights_NK * self._scale
        probabilities_NE = scores_NE / scores_NE.sum(-1, keepdim=True)
        return Choices(logits_NE, probabilities_NE, weights_NK, chosen_NK, likeliest_NK)

    @torch.no_grad()
    def balance(self, counts_E: Tensor, *, rate: float) -> None:
        """Raise the biases of experts with fewer tokens than the mean, lower the others.

        Args:
            counts_E: tokens of each expert in a step, over all ranks.
        """
        counts_E = counts_E.double()
        self.e_score_correction_bias.add_((counts_E.mean() - counts_E).sign(), alpha=rate)

    def _apply(self, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Move the module or change its dtype; the bias stays fp32."""
        before = self.e_score_correction_bias
        super()._apply(function, recurse)
        moved = self.e_score_correction_bias
        if moved.dtype != torch.float32:
            kept = moved.float() if before.is_meta else before.to(moved.device, torch.float32)
            self.e_score_correction_bias = kept
        return self


def in_best_groups(
    scores_NE: Tensor, groups: tuple[int, int], *, score: Callable[[Tensor], Tensor]
) -> Tensor:
    """(N, E) bool: whether an expert is in one of a token's best groups.

    Args:
        groups: their number, and how many of them are best.
        score: score of each group, (N, G), by the scores of its experts, (N, G, E / G).
    """
    scores_NGE = scores_NE.unflatten(1, (groups[0], -1))
    best = score(scores_NGE).topk(groups[1])[1]
    kept_NG = torch.zeros_like(scores_NGE[..., 0], dtype=torch.bool).scatter_(1, best, True)
    return kept_NG[..., None].expand_as(scores_NGE).flatten(1)


def _highest(scores_NGE: Tensor) -> Tensor:
    return scores_NGE.amax(-1)


def _sum_of_two(scores_NGE: Tensor) -> Tensor:
    return scores_NGE.topk(min(2, scores_NGE.shape[-1]))[0].sum(-1)


def one_hot(chosen_NK: Tensor, *, like: Tensor) -> Tensor:
    """(N, E) 1 for the chosen experts of a token, else 0; in the shape and dtype of scores."""
    return torch.zeros_like(like).scatter_(1, chosen_NK, 1.0)


def balanced_routers(model: nn.Module) -> dict[int, BalancedRouter]:
    """Routers of a stage whose biases a training changes, by the index of their layer."""
    layers: Any = model.layers
    routers = {int(n): getattr(layer.mlp, "gate", None) for n, layer in layers.items()}
    return {n: gate for n, gate in routers.items() if isinstance(gate, BalancedRouter)}
