"""Tensors of a model by name, independent of any checkpoint format.

Tensors have the names of Hugging Face's Llama in all families, one name a parameter. Formats read
into such mappings and write from them; `to_model` connects them to the model code.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokamake import plugins
from tokamake.checkpoint.tensors import dtypes
from tokamake.checkpoint.tensors.dtypes import Dtype
from tokamake.checkpoint.tensors.extents import Extent
from tokamake.config.architecture import Architecture
from tokamake.errors import UserError
from tokamake.models.common import tensor_shapes

if TYPE_CHECKING:
    from torch import Tensor, nn

    from tokamake.models.common.random_weights import RandomWeights


_REMEDY = "fetch or write the checkpoint again, or fix its architecture"
ADAPTER = "a LoRA adapter (PEFT), no whole model; merge it into its model (PEFT: merge_and_unload)"
QUANTIZED = "quantized weights; dequantize the model (transformers: model.dequantize()), save that"
WITHOUT_GRADIENT = f".{tensor_shapes.ROUTER_BIAS}"
"""End of the names of tensors that no optimizer changes; they are fp32 at any precision."""
_AS_HF = "convert it to Hugging Face's format with safetensors"
_FILES = {
    "adapter_*": ADAPTER,
    "*.gguf": f"a GGUF file of llama.cpp; fetch the model that it was made from, or {_AS_HF}",
    "consolidated*.pth": f"a checkpoint in the format of Meta's own code; {_AS_HF}",
    "*.nemo": f"a checkpoint of NeMo; {_AS_HF}",
    "tf_model*.h5": f"weights of TensorFlow; {_AS_HF}",
    "flax_model*.msgpack": f"weights of Flax; {_AS_HF}",
}
_TENSORS = {
    r"base_model\.model\..*|(.*\.)?(lora|vera)_.*": ADAPTER,
    r".*\.(qweight|qzeros|g_idx|SCB|weight_(scale|scale_inv|packed|zero_point))": QUANTIZED,
    r".*_proj_(blocks|scales)": QUANTIZED,
    r".*\.weight\.(absmax|quant_map|nested_\w+|quant_state\..*)": QUANTIZED,
}


def _empty_model(architecture: Architecture) -> "nn.Module":
    import torch

    with torch.device("meta"):
        model: nn.Module = plugins.load("models/*/model", architecture.family).Model(architecture)
    return model


def shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor that a checkpoint of this architecture holds."""
    family = plugins.load("models/*/hf", architecture.family)
    by_name: dict[str, tuple[int, ...]] = family.shapes(architecture)
    return by_name


def weight_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Return the shapes of whole weights, by their keys in `Checkpoint.source`."""
    return {f"model.{name}": tuple(shape) for name, shape in shapes(architecture).items()}


def to_model(architecture: Architecture, tensors: "Mapping[str, Tensor]") -> "nn.Module":
    """Build a model of the given tensors, with their dtype, without copying."""
    rename = plugins.load("models/*/model", architecture.family).Model.tensor_name
    model = _empty_model(architecture)
    state = {name: tensors[rename(name)] for name in model.state_dict()}
    model.load_state_dict(state, assign=True)
    return model


def random_weights(architecture: Architecture, seed: int) -> "RandomWeights":
    """Return the random weights of a new model, which are drawn part by part."""
    from tokamake.models.common.random_weights import RandomWeights

    model = plugins.load("models/*/model", architecture.family).Model
    names = ("into_residual", "has_centered_norms")
    return RandomWeights(architecture, seed, **{name: getattr(model, name) for name in names})


def check_names(names: Iterable[str], expected: Mapping[str, Any], *, where: object) -> None:
    """Check that a checkpoint has exactly the tensors of its architecture."""
    missing, unknown = sorted(expected.keys() - {*names}), sorted({*names} - expected.keys())
    for name in unknown:
        if other := unsupported_model(name):
            raise UserError(f"{where}: tensor {name} belongs to {other}")
    problems = [
        f"tensor {wrong[0]}{f' (and {len(wrong) - 1} more)' * (len(wrong) > 1)} {problem}"
        for problem, wrong in (("is missing", missing), ("is not part of the model", unknown))
        if wrong
    ]
    if problems:
        raise UserError(f"{where}: {', and '.join(problems)}; {_REMEDY}")


def check_shape(name: str, shape: Sequence[int], *, expected: Sequence[int], where: object) -> None:
    if tuple(shape) != tuple(expected):
        raise UserError(
            f"{where}: tensor {name} has shape {list(shape)}, the architecture calls for "
            f"{list(expected)}; {_REMEDY}"
        )


def check_weight(name: str, extent: Extent, *, shape: Sequence[int]) -> None:
    """Check the shape and the dtype of a stored weight."""
    check_shape(name, extent.shape, expected=shape, where=extent.file)
    check_dtype(name, extent.dtype, where=extent.file)


def check_dtype(name: str, dtype: Dtype, *, where: object) -> None:
    if dtype.short is None:
        raise UserError(
            f"{where}: tensor {name} is {dtype}; save weights in one of "
            f"{', '.join(dtypes.OF_WEIGHTS)}"
        )


def summary(architecture: Architecture) -> str:
    """Describe the size of a new model, e.g. `3,412,992 parameters in 38 tensors, fp32`."""
    sizes = [*map(math.prod, shapes(architecture).values())]
    return f"{sum(sizes):,} parameters in {len(sizes)} tensors, fp32"


def unsupported_file(path: Path) -> str | None:
    """Describe a file, or the first known one of a folder, with the remedy; None: none is known."""
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        for pattern, text in _FILES.items():
            if file.is_file() and file.match(pattern):
                return f"is {text}" if file == path else f"{file.name} is {text}"
    return None


def unsupported_model(name: str) -> str | None:
    """Describe the module of a tensor that no plain model has, with the remedy."""
    return next((text for pattern, text in _TENSORS.items() if re.fullmatch(pattern, name)), None)
