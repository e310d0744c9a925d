"""Hugging Face's checkpoint folder: config.json and safetensors, whole or in shards.

Evaluation reads it, `init_model` writes it; `formats.hf` converts it. Tensors keep their dtype.
What model types there are, and how their tensors differ from ours, families say: `HFFormat`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokamake import files, plugins
from tokamake.checkpoint import model_tensors as checkpoint_tensors
from tokamake.config.architecture import Architecture
from tokamake.errors import UserError
from tokamake.models.common.hf_format import HFFormat
from tokamake.validation import validate

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from tokamake.checkpoint.tensors.dtypes import Dtype

_REMEDY = "fix model.checkpoint, or fetch the checkpoint again"


class Folder(Mapping[str, "Tensor"]):
    """Tensors of a folder by name, each read from its memory-mapped file when it is asked for."""

    def __init__(self, path: Path) -> None:
        self._files: dict[str, Any] = {}
        self._file_of = _locate(path)
        for file in sorted(set(self._file_of.values())):
            self._files[str(file)] = _open(file)
        present = {file: set(opened.keys()) for file, opened in self._files.items()}
        for name, file in self._file_of.items():
            if name not in present[str(file)]:
                raise UserError(f"{file}: tensor {name} is missing; {_REMEDY}")

    def __getitem__(self, name: str) -> "Tensor":
        tensor: Tensor = self._files[str(self._file_of[name])].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)

    def file(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self._file_of[name]


def _locate(path: Path) -> dict[str, Path]:
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if single.is_file():
        return dict.fromkeys(_open(single).keys(), single)
    if index.is_file():
        return read_index(index)
    raise UserError(
        f"{path}: no model.safetensors nor model.safetensors.index.json; "
        "save the checkpoint with safe_serialization=True"
    )


def read_index(file: Path) -> dict[str, Path]:
    """Files of tensors that lie in several, by name.

    Raises:
        UserError: the index is damaged.
    """
    content = files.read_json(file, _REMEDY)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{file}: no weight_map; {_REMEDY}")
    return {name: file.parent / str(shard) for name, shard in weight_map.items()}


def _open(file: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="pt")
    except FileNotFoundError:
        raise UserError(f"{file}: no such file; {_REMEDY}") from None
    except SafetensorError as error:
        raise UserError(f"{file}: damaged ({error}); {_REMEDY}") from None


def read(path: Path) -> "tuple[Architecture, dict[str, Tensor]]":
    """Read a folder.

    Returns:
        Architecture, and tensors by our names; those that the model type has as we do are backed by
        the memory-mapped files.

    Raises:
        UserError: a file is missing or damaged, the model is none that we can train, or a tensor is
            missing, unknown or of the wrong shape; the message names it and its file.
    """
    architecture, stored = read_config(path)
    folder = Folder(path)
    file_of = {with_prefix(name, folder, stored): folder.file(name) for name in folder}
    kept = {
        with_prefix(name, folder, stored): folder[name]
        for name in folder
        if not re.fullmatch(stored.ignored, name)
    }
    _drop_tied_copy(architecture, kept, stored, str(path))
    names = checkpoint_tensors.shapes(architecture)
    wanted = _shapes(architecture, stored)
    checkpoint_tensors.check_names(kept, wanted, str(path))
    for name, shape in wanted.items():
        checkpoint_tensors.check_shape(name, kept[name].shape, shape, str(file_of[name]))
    checkpoint_tensors.common_dtype(kept, str(path))
    return architecture, stored.from_hf(architecture, kept, names)


def with_prefix(name: str, names: Iterable[str], stored: HFFormat) -> str:
    """Complete a name of a file that holds a model without its output layer."""
    if name.startswith(stored.prefix) or any(other.startswith(stored.prefix) for other in names):
        return name
    return name if name.startswith("lm_head.") else stored.prefix + name


def _shapes(architecture: Architecture, stored: HFFormat) -> "dict[str, torch.Size]":
    import torch

    shapes = checkpoint_tensors.shapes(architecture)
    empty = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    return {name: tensor.shape for name, tensor in stored.to_hf(architecture, empty).items()}


def _drop_tied_copy(
    architecture: Architecture, tensors: "dict[str, Tensor]", stored: HFFormat, where: str
) -> None:
    """Some tied checkpoints store the output layer too; a different one contradicts the config."""
    if not architecture.tie_word_embeddings or "lm_head.weight" not in tensors:
        return
    name = stored.name("model.embed_tokens.weight")
    head, embedding = tensors.pop("lm_head.weight"), tensors.get(name)
    if embedding is not None and not head.equal(embedding):
        raise not_tied(name, where)


def not_tied(name: str, where: str) -> UserError:
    """The error of an output layer that contradicts the config.

    Args:
        name: of the embedding.
        where: file or folder.
    """
    return UserError(
        f"{where}: tensor lm_head.weight differs from {name}, but "
        "config.json says tie_word_embeddings; set it to false"
    )


def read_config(path: Path) -> tuple[Architecture, HFFormat]:
    """Read a folder's config.json, as transformers 4 or 5 writes it.

    Returns:
        Shape of the model, and how its tensors differ from ours.

    Raises:
        UserError: it is missing, or describes a model that no family of ours covers.
    """
    where = path / "config.json"
    config = files.read_json(where, _REMEDY)
    kind = config.get("model_type") if isinstance(config, dict) else None
    family, stored = _format_of(kind, where)
    if problem := stored.unsupported(config):
        raise UserError(f"{where}: {problem}")
    values = {"family": family, **stored.fields(config)}
    architecture = validate(Architecture, values, str(where))
    if architecture.vocab_size is None:
        raise UserError(f"{where}: vocab_size: missing; {_REMEDY}")
    if config.get("head_dim") not in (None, architecture.head_dim):
        raise UserError(
            f"{where}: head_dim: {config['head_dim']!r}: models of type {kind} have hidden_size / "
            f"num_attention_heads ({architecture.head_dim}); set that"
        )
    return architecture, stored


def _format_of(kind: Any, where: Path) -> tuple[str, HFFormat]:
    formats = {
        stored.model_type: (family, stored)
        for family in plugins.names("models/*/hf")
        for stored in plugins.load("models/*/hf", family).HUGGING_FACE
    }
    if kind not in formats:
        raise UserError(
            f"{where}: model_type: {kind!r} is not known; choose a model of type "
            f"{', '.join(sorted(formats))}"
        )
    return formats[kind]


def format_for(architecture: Architecture) -> HFFormat:
    """transformers' model type that can hold such a model.

    Raises:
        UserError: there is none.
    """
    formats: Iterable[HFFormat] = plugins.load("models/*/hf", architecture.family).HUGGING_FACE
    differences = {stored: stored.differences(architecture) for stored in formats}
    # Positions first: a model has these for a reason.
    best = min(
        differences,
        key=lambda stored: ("position_embedding" in differences[stored], len(differences[stored])),
    )
    if not differences[best]:
        return best
    first, has = differences[best][0], best.nearest(architecture)
    raise UserError(
        f"model.architecture: {first}: {getattr(architecture, first)!r}: transformers has no model "
        f"type for such a {architecture.family}; {best.model_type}, the nearest, has "
        f"{has[first]!r}: set that"
    )


def config(
    architecture: Architecture, dtype: "torch.dtype | Dtype", eos_token: int | list[int] | None
) -> dict[str, Any]:
    """The content of config.json, for transformers 4 and 5.

    Args:
        architecture: shape of the model, vocab_size filled in.
        dtype: the weights' type.
        eos_token: token that ends a text, or several; None says that there is none, for a missing
            key would mean a default one to transformers.

    Raises:
        UserError: transformers has no such model.
    """
    stored = format_for(architecture)
    return {
        "architectures": [stored.class_name],
        "model_type": stored.model_type,
        **stored.config(architecture),
        "bos_token_id": None,
        "eos_token_id": eos_token,
        # read by both; a `dtype` beside it would outlive a cast by version 4
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def write_config(folder: Path, content: Mapping[str, Any]) -> None:
    """Write what `config` returns, and how to generate text."""
    files.write_json(folder / "generation_config.json", {"eos_token_id": content["eos_token_id"]})
    files.write_json(folder / "config.json", content)


def write(path: Path, architecture: Architecture, tensors: "Mapping[str, Tensor]") -> None:
    """Write a folder, whole or not at all.

    Args:
        path: folder; an existing one is replaced.
        architecture: shape of the model, vocab_size filled in.
        tensors: by our names, all of one dtype.

    Raises:
        UserError: transformers has no such model, or the tensors are not the architecture's.
    """
    from safetensors.torch import save_file

    checkpoint_tensors.check_names(tensors, checkpoint_tensors.shapes(architecture), str(path))
    dtype = checkpoint_tensors.common_dtype(tensors, str(path))
    content = config(architecture, dtype, eos_token=None)
    theirs = format_for(architecture).to_hf(architecture, tensors)
    own = {name: tensor.detach().cpu().contiguous() for name, tensor in theirs.items()}
    with files.atomic_folder(path) as temporary:
        write_config(temporary, content)
        weights = temporary / "model.safetensors"
        save_file(own, weights, metadata={"format": "pt"})
        # safetensors hides its file from the group, whatever the umask says
        weights.chmod((temporary / "config.json").stat().st_mode & 0o777)
