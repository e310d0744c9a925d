"""config.json of a Hugging Face folder: the shape of the model, and its model type.

Each family lists the model types of transformers that it covers, as `HFFormat` in its `hf.py`.
"""

import functools
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tokamake import files, plugins
from tokamake.checkpoint import model_tensors
from tokamake.config.architecture import Architecture
from tokamake.config_files import validate
from tokamake.errors import UserError, reason_of
from tokamake.models.common.hf_format import HFFormat, label_keys, label_names

if TYPE_CHECKING:
    import torch

    from tokamake.checkpoint.tensors.dtypes import Dtype

_log = logging.getLogger(__name__)

GENERATION_CONFIG = "generation_config.json"
"""How transformers generates by default."""
REMEDY = "fetch or export the checkpoint again"
_FAMILIES = "models/*/hf"


def read_config(folder: Path) -> tuple[Architecture, HFFormat]:
    """Read config.json of transformers 4 or 5: shape of the model, format of its tensors."""
    file = folder / "config.json"
    config = files.read_json(file, REMEDY)
    model_type = config.get("model_type") if isinstance(config, dict) else None
    family, model_format = _find_model_type(model_type, file)
    quantization = config.get("quantization_config") or {}
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    is_read = model_format.interleaves_experts and method == "mxfp4"
    if quantization and not is_read:
        raise UserError(f"{file}: quantization_config: the folder holds {model_tensors.QUANTIZED}")
    values, ignored = _stated(config, model_format, file=file)
    if config.get("auto_map"):
        warn_once(
            f"{file}: auto_map: the model's own Python code is not run; the model is built as "
            f"transformers builds the type {model_type}"
        )
    if ignored:
        warn_once(f"{file}: {', '.join(ignored)}: ignored, as transformers ignores it")
    architecture = validate(Architecture, {"family": family, **values}, str(file))
    if architecture.vocab_size is None:
        raise UserError(f"{file}: vocab_size: missing; {REMEDY}")
    head_dim = model_format.config(architecture).get("head_dim", architecture.head_dim)
    if config.get("head_dim") not in (None, head_dim):
        raise UserError(
            f"{file}: head_dim: {config['head_dim']!r}: models of type {model_type} have "
            f"{head_dim}, which follows from other keys; set that"
        )
    return architecture, model_format


def _stated(
    config: Mapping[str, Any], model_format: HFFormat, *, file: Path
) -> tuple[dict[str, Any], list[str]]:
    """Fields of an `Architecture`, and keys that are ignored."""
    try:
        if problem := model_format.unsupported(config):
            raise UserError(f"{file}: {problem}")
        return model_format.fields(config), model_format.ignored_keys(config)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        # Keys are read before `validate` checks their types.
        raise UserError(
            f"{file}: the value of a key has a wrong type ({reason_of(error)}); {REMEDY}"
        ) from None


@functools.cache  # the same folder is opened several times
def warn_once(message: str) -> None:
    """Log a warning once."""
    _log.warning(message)


def _find_model_type(model_type: Any, file: Path) -> tuple[str, HFFormat]:
    formats = {
        model_format.model_type: (family, model_format)
        for family in plugins.names(_FAMILIES)
        for model_format in plugins.load(_FAMILIES, family).HUGGING_FACE
    }
    if isinstance(model_type, str) and model_type in formats:
        return formats[model_type]
    known = f"choose a model of type {', '.join(sorted(formats))}"
    for family in plugins.names(_FAMILIES):
        plug_in = plugins.load(_FAMILIES, family)
        if reason := getattr(plug_in, "REFUSED", {}).get(str(model_type)):
            nearest = plug_in.HUGGING_FACE[0].model_type
            raise UserError(
                f"{file}: model_type: {model_type!r} is not supported: {reason}; the nearest type "
                f"is {nearest}; {known}"
            )
    raise UserError(f"{file}: model_type: {model_type!r} is not known; {known}")


def format_for(architecture: Architecture) -> HFFormat:
    """Return the model type of transformers that can hold a model of this shape."""
    formats: Iterable[HFFormat] = plugins.load(_FAMILIES, architecture.family).HUGGING_FACE
    if not formats:
        raise UserError(
            f"model.architecture: family: {architecture.family}: transformers has no model type "
            "for it; choose another format, such as native"
        )
    differences = {each: each.differences(architecture) for each in formats}
    # The same positions count most: a user rarely can change them to fit transformers.
    nearest = min(
        differences,
        key=lambda each: ("position_embedding" in differences[each], len(differences[each])),
    )
    if not differences[nearest]:
        return nearest
    field, values = differences[nearest][0], nearest.nearest(architecture)
    raise UserError(
        f"model.architecture: {field}: {getattr(architecture, field)!r}: transformers has no model "
        f"type for such a {architecture.family}; {nearest.model_type}, the nearest, has "
        f"{values[field]!r}: set that"
    )


def read_generation_config(path: Path) -> dict[str, Any]:
    file = path / GENERATION_CONFIG if path.is_dir() else path
    value = files.read_json(file, REMEDY)
    if not isinstance(value, dict):
        raise UserError(f"{file}: not a JSON object; {REMEDY}")
    return value


def notes(folder: Path, config: Mapping[str, Any], *, model_format: HFFormat) -> dict[str, Any]:
    """Values of config.json and generation_config.json that are no shape of the model."""
    noted = ("model_type", "bos_token_id", "eos_token_id")
    notes = {key: config[key] for key in noted if key in config}
    rates = {rate: config[key] for key, rate in model_format.dropout.items() if key in config}
    if any(rates.values()):
        notes["dropout"] = rates
    if labels := label_names(config):
        notes["labels"] = labels
    if (folder / GENERATION_CONFIG).is_file():
        notes["generation"] = read_generation_config(folder)
    return notes


def including(stated: Any, token: int | list[int] | None) -> int | list[int] | None:
    """Return the stated end-of-text tokens if the model's token is among them, else that token."""
    return stated if isinstance(stated, list) and token in stated else token


def write_config(
    folder: Path,
    architecture: Architecture,
    *,
    dtype: "torch.dtype | Dtype",
    eos_token: int | list[int] | None,
    bos_token: int | None = None,
    notes: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Write config.json and generation_config.json, for transformers 4 and 5.

    Args:
        eos_token: end-of-text token, or several. None is written as null: transformers would take
            a missing key for its default token.
        notes: further `EXPORT_NOTES`. `generation`: settings of generation_config.json, and
            end-of-text tokens of its own if they include `eos_token`. `dropout`: rates of training;
            transformers drops nothing in inference, and a model that is trained further there has
            the rates that its type has keys for. `labels`: names of classes.
    """
    model_format = format_for(architecture)
    generation, dropout = notes.get("generation", {}), notes.get("dropout", {})
    # Decoders of encoder-decoders begin with that token.
    start_token = generation.get("decoder_start_token_id", bos_token)
    has_start = architecture.has_decoder and start_token is not None
    start = {"decoder_start_token_id": start_token} if has_start else {}
    config: Mapping[str, Any] = {
        "architectures": [model_format.class_name],
        "model_type": model_format.model_type,
        **model_format.config(architecture),
        **{key: dropout.get(rate, 0.0) for key, rate in model_format.dropout.items()},
        **label_keys(notes.get("labels") or ()),
        "bos_token_id": bos_token,
        "eos_token_id": eos_token,
        **start,
        # Both versions read torch_dtype. Version 4 keeps an additional `dtype` as it is, so that
        # the key would be wrong after a cast.
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    stop_tokens = including(generation.get("eos_token_id"), eos_token)
    tokens = {"bos_token_id": bos_token, "eos_token_id": stop_tokens}
    files.write_json(folder / GENERATION_CONFIG, {**generation, **tokens, **start})
    files.write_json(folder / "config.json", config)
