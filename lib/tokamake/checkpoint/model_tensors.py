"""A checkpoint's tensors between the formats: a mapping from names to tensors.

Names are those of Hugging Face's Llama for all families, one for each parameter. Formats read into
it and write from it; `to_model` and `from_model` connect it to the model's code.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tokamake import plugins
from tokamake.checkpoint.tensors import dtypes
from tokamake.config.architecture import Architecture
from tokamake.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


def _empty_model(architecture: Architecture) -> "nn.Module":
    import torch

    with torch.device("meta"):
        model: nn.Module = plugins.load("models/*/model", architecture.family).Model(architecture)
    return model


def from_model(architecture: Architecture, model: "nn.Module") -> "dict[str, Tensor]":
    """The tensors of a model, not copied, under their names in a checkpoint."""
    rename = plugins.load("models/*/model", architecture.family).Model.tensor_name
    return {rename(name): parameter.detach() for name, parameter in model.named_parameters()}


def shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of this architecture holds."""
    stored = plugins.load("models/*/hf", architecture.family)
    found: dict[str, tuple[int, ...]] = stored.shapes(architecture)
    return found


def to_model(architecture: Architecture, tensors: "Mapping[str, Tensor]") -> "nn.Module":
    """Build the model on the tensors themselves: dtype and device stay, nothing is copied."""
    rename = plugins.load("models/*/model", architecture.family).Model.tensor_name
    model = _empty_model(architecture)
    named = {name: tensors[rename(name)] for name, _ in model.named_parameters()}
    model.load_state_dict(named, assign=True)
    return model


def random(architecture: Architecture, seed: int) -> "dict[str, Tensor]":
    """Random weights in fp32, on the CPU; they depend on architecture and seed alone."""
    model: Any = _empty_model(architecture).to_empty(device="cpu")
    model.initialize(seed)
    return from_model(architecture, model)


def check_names(found: Mapping[str, Any], wanted: Mapping[str, Any], where: str) -> None:
    """Check that a checkpoint has the tensors that its architecture calls for, and no others.

    Raises:
        UserError: a tensor is missing or not part of the model.
    """
    for problem, names in (
        ("is missing", sorted(wanted.keys() - found.keys())),
        ("is not part of the model", sorted(found.keys() - wanted.keys())),
    ):
        if names:
            others = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise UserError(
                f"{where}: tensor {names[0]}{others} {problem}; "
                "fetch or export the checkpoint again, or mend its architecture"
            )


def check_shape(name: str, found: Sequence[int], wanted: Sequence[int], where: str) -> None:
    """Check one tensor's shape.

    Raises:
        UserError: it does not fit the architecture.
    """
    if tuple(found) != tuple(wanted):
        raise UserError(
            f"{where}: tensor {name} has shape {list(found)}, the architecture calls for "
            f"{list(wanted)}; fetch or export the checkpoint again, or mend its architecture"
        )


def common_dtype(tensors: "Mapping[str, Tensor]", where: str) -> "torch.dtype":
    """The one dtype of all tensors.

    Raises:
        UserError: there are several, or it is not a floating-point type that models are kept in.
    """
    dtype, known = None, [each.torch for each in dtypes.OF_WEIGHTS.values()]
    for name, tensor in tensors.items():
        dtype = dtype or tensor.dtype
        if tensor.dtype != dtype or dtype not in known:
            raise UserError(
                f"{where}: tensor {name} is {tensor.dtype}; save all tensors in one of "
                f"{', '.join(dtypes.OF_WEIGHTS)}"
            )
    assert dtype is not None, "a checkpoint holds tensors"
    return dtype


def summary(tensors: "Mapping[str, Tensor]") -> str:
    """Size of a checkpoint in words, e.g. `3,412,992 parameters in 38 tensors, fp32`."""
    parameters = sum(tensor.numel() for tensor in tensors.values())
    kind = dtypes.of(next(iter(tensors.values())).dtype).short
    return f"{parameters:,} parameters in {len(tensors)} tensors, {kind}"
