"""Which weights decay: parameters come from the model, groups go to an optimizer's `build`."""

from collections.abc import Iterable
from typing import Any

from torch.nn import Parameter


def parameter_groups(
    parameters: Iterable[tuple[str, Parameter]], weight_decay: float
) -> list[dict[str, Any]]:
    """Split parameters into a group that decays and one that does not.

    Matrices and embeddings (two dimensions or more) decay, norms and biases do not, as in GPT-3
    and Llama training; frozen parameters are in neither group.

    Args:
        parameters: pairs of name and parameter, as `Module.named_parameters` yields them.
        weight_decay: decay of the first group.
    """
    trained = [parameter for _, parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
