"""Parameter groups: which parameters decay, which are hidden matrices, and their options.

`build` of an optimizer takes the groups; `set_rates` sets their rates before each step.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from tokamake.config.optimization import OptimizerSettings

if TYPE_CHECKING:
    from tokamake.parallel.placement import Placement


def parameter_groups(
    parameters: Iterable[tuple[str, Parameter]],
    weight_decay: float,
    *,
    placements: Mapping[str, "Placement"] | None = None,
) -> list[dict[str, Any]]:
    """Split parameters into a group with weight decay and one without; no group is empty.

    Matrices and embeddings (two or more dimensions) decay; norms and biases do not, as for GPT-3
    and Llama. A placement may say otherwise. Frozen parameters are in no group. Besides torch's
    keys, a group has `decays` (bool), `param_names` and `param_hidden` (list of bool): whether
    each parameter is a hidden matrix.

    Args:
        placements: of parameters, by name.
    """
    decaying: list[tuple[str, Parameter, bool]] = []
    plain: list[tuple[str, Parameter, bool]] = []
    for name, parameter in parameters:
        placement = (placements or {}).get(name)
        decays = placement.decays if placement else None
        hidden = placement.hidden if placement else None
        if parameter.requires_grad:
            group = decaying if (parameter.dim() >= 2 if decays is None else decays) else plain
            is_hidden = _is_hidden(name, parameter) if hidden is None else hidden
            group.append((name, parameter, is_hidden))
    groups = [_group(decaying, weight_decay, decays=True), _group(plain, 0.0, decays=False)]
    return [group for group in groups if group["params"]]


def _group(
    named: list[tuple[str, Any, bool]], weight_decay: float, *, decays: bool, **more: Any
) -> dict[str, Any]:
    return {
        "params": [parameter for _, parameter, _ in named],
        "param_names": [name for name, _, _ in named],
        "param_hidden": [is_hidden for *_, is_hidden in named],
        "weight_decay": weight_decay,
        "decays": decays,
        **more,
    }


def part_hidden_matrices(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Split each group into hidden matrices (`hidden` is True) and the rest (`hidden` is False).

    Hidden matrices are in numbered layers in any family: a component of their name is a
    number, as in layers.3.mlp.up_proj.weight. Embeddings and the output layer are not hidden.
    """
    parted = []
    for group in groups:
        columns = (group[key] for key in ("param_names", "params", "param_hidden"))
        named = list(zip(*columns, strict=True))
        for hidden in (True, False):
            if chosen := [each for each in named if each[2] == hidden]:
                decays, weight_decay = group["decays"], group["weight_decay"]
                parted.append(_group(chosen, weight_decay, decays=decays, hidden=hidden))
    return parted


def _is_hidden(name: str, parameter: Tensor) -> bool:
    return parameter.dim() == 2 and any(part.isdecimal() for part in name.split("."))


def set_rates(
    optimizer: torch.optim.Optimizer, *, learning_rate: float, weight_decay: float
) -> None:
    """Set the rates of the next step in an optimizer, or in DeepSpeed's wrapper of it."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
        if group.get("decays", group["weight_decay"] != 0):
            group["weight_decay"] = weight_decay


def adam_options(settings: OptimizerSettings) -> dict[str, Any]:
    """Arguments of torch's Adam, and of optimizers with the same names."""
    epsilon = settings.used("epsilon")
    return {"lr": settings.learning_rate, "betas": settings.betas, "eps": epsilon}
