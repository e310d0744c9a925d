"""Which parameters decay, and what the optimizer's rates are in each group.

Parameters come from the model; groups go to an optimizer's `build`, and rates to them each step.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter


def parameter_groups(
    parameters: Iterable[tuple[str, Parameter]], weight_decay: float
) -> list[dict[str, Any]]:
    """Split parameters into a group that decays and one that does not.

    Matrices and embeddings (two dimensions or more) decay, norms and biases do not, as in GPT-3
    and Llama training; frozen parameters are in neither group. A group has `decays`, whether it
    does, and `param_names`, as torch calls them.

    Args:
        parameters: pairs of name and parameter, as `Module.named_parameters` yields them.
        weight_decay: decay of the first group.
    """
    trained = [(name, each) for name, each in parameters if each.requires_grad]
    matrices = [pair for pair in trained if pair[1].dim() >= 2]
    vectors = [pair for pair in trained if pair[1].dim() < 2]
    groups = [_group(matrices, weight_decay, decays=True), _group(vectors, 0.0, decays=False)]
    return [group for group in groups if group["params"]]


def _group(
    named: list[tuple[str, Any]], weight_decay: float, *, decays: bool, **more: Any
) -> dict[str, Any]:
    return {
        "params": [parameter for _, parameter in named],
        "param_names": [name for name, _ in named],
        "weight_decay": weight_decay,
        "decays": decays,
        **more,
    }


def part_hidden_matrices(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Split each group into its hidden matrices, marked `hidden`, and the rest.

    Hidden are the matrices of numbered layers, whatever a family calls them: a part of the name
    is a number, as in layers.3.mlp.up_proj.weight. Embeddings and the output layer are outside.

    Args:
        groups: as `parameter_groups` makes them.
    """
    found = []
    for group in groups:
        named = list(zip(group["param_names"], group["params"], strict=True))
        for hidden in (True, False):
            chosen = [pair for pair in named if _is_hidden(*pair) == hidden]
            if chosen:
                decays, weight_decay = group["decays"], group["weight_decay"]
                found.append(_group(chosen, weight_decay, decays=decays, hidden=hidden))
    return found


def _is_hidden(name: str, parameter: Tensor) -> bool:
    return parameter.dim() == 2 and any(part.isdecimal() for part in name.split("."))


def set_rates(
    optimizer: torch.optim.Optimizer, *, learning_rate: float, weight_decay: float
) -> None:
    """Tell an optimizer, or what DeepSpeed makes of it, the rates of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
        if group.get("decays", group["weight_decay"] != 0):
            group["weight_decay"] = weight_decay
