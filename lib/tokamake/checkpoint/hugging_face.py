"""Hugging Face's checkpoint folder: config.json and safetensors, whole or in shards.

`import_hf` and evaluation read it, `init_model` and `export_hf` write it. Tensors keep their dtype.
"""

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tokamake import files
from tokamake.checkpoint import tensors as checkpoint_tensors
from tokamake.config import Architecture
from tokamake.errors import UserError
from tokamake.validation import validate

_TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "*.model")
"""Patterns of what may lie beside the weights and is replaced with them."""

_REMEDY = "fix model.checkpoint, or fetch the checkpoint again"
_DEFAULTS = {
    "num_key_value_heads": None,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
}
"""What transformers' LlamaConfig takes a missing key for."""
_UNSUPPORTED = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "hidden_act": ("silu", None),
    "quantization_config": (None,),
}
"""Keys of config.json that change the model, and the values that our Llama covers."""


class Folder(Mapping[str, Tensor]):
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

    def __getitem__(self, name: str) -> Tensor:
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
        content = files.read_json(index, _REMEDY)
        weight_map = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(weight_map, dict) or not weight_map:
            raise UserError(f"{index}: no weight_map; {_REMEDY}")
        return {name: path / str(file) for name, file in weight_map.items()}
    raise UserError(
        f"{path}: no model.safetensors nor model.safetensors.index.json; "
        "save the checkpoint with safe_serialization=True"
    )


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except FileNotFoundError:
        raise UserError(f"{file}: no such file; {_REMEDY}") from None
    except SafetensorError as error:
        raise UserError(f"{file}: damaged ({error}); {_REMEDY}") from None


def read(path: Path) -> tuple[Architecture, dict[str, Tensor]]:
    """Read a folder.

    Returns:
        Architecture, and tensors by Hugging Face's names, backed by the memory-mapped files.

    Raises:
        UserError: a file is missing or damaged, the model is none that we can train, or a tensor is
            missing, unknown or of the wrong shape; the message names it and its file.
    """
    architecture = read_architecture(path)
    folder = Folder(path)
    kept = {name: folder[name] for name in folder if not name.endswith("rotary_emb.inv_freq")}
    _drop_tied_copy(architecture, kept, str(path))
    wanted = checkpoint_tensors.shapes(architecture)
    checkpoint_tensors.check_names(kept, wanted, str(path))
    for name, shape in wanted.items():
        checkpoint_tensors.check_shape(name, kept[name].shape, shape, str(folder.file(name)))
    checkpoint_tensors.common_dtype(kept, str(path))
    return architecture, {name: kept[name] for name in wanted}


def _drop_tied_copy(architecture: Architecture, tensors: dict[str, Tensor], where: str) -> None:
    """Some tied checkpoints store the output layer too; a different one contradicts the config."""
    if not architecture.tie_word_embeddings or "lm_head.weight" not in tensors:
        return
    head, embedding = tensors.pop("lm_head.weight"), tensors.get("model.embed_tokens.weight")
    if embedding is not None and not head.equal(embedding):
        raise UserError(
            f"{where}: tensor lm_head.weight differs from model.embed_tokens.weight, but "
            "config.json says tie_word_embeddings; set it to false"
        )


def read_architecture(path: Path) -> Architecture:
    """Read a folder's config.json, as transformers 4 or 5 writes it.

    Raises:
        UserError: it is missing, or describes a model that our Llama does not cover.
    """
    where = path / "config.json"
    config = files.read_json(where, _REMEDY)
    if not isinstance(config, dict) or config.get("model_type") != "llama":
        kind = config.get("model_type") if isinstance(config, dict) else None
        raise UserError(f"{where}: model_type: {kind!r} is not known; choose a model of type llama")
    for key, covered in _UNSUPPORTED.items():
        if config.get(key) not in covered:
            raise UserError(
                f"{where}: {key}: {config[key]!r} is not supported; "
                f"choose a model with {covered[0]!r}"
            )
    values = {
        key: config.get(key, _DEFAULTS.get(key))
        for key in Architecture.model_fields
        if key in config or key in _DEFAULTS
    }
    values |= {"family": "llama", "rope_theta": _rope_theta(config, where)}
    values["num_key_value_heads"] = values["num_key_value_heads"] or config.get(
        "num_attention_heads"
    )
    architecture = validate(Architecture, values, str(where))
    if architecture.vocab_size is None:
        raise UserError(f"{where}: vocab_size: missing; {_REMEDY}")
    if config.get("head_dim") not in (None, architecture.head_dim):
        raise UserError(
            f"{where}: head_dim: {config['head_dim']!r} is not hidden_size / num_attention_heads "
            f"({architecture.head_dim}); choose a model where it is"
        )
    return architecture


def _rope_theta(config: dict[str, Any], where: Path) -> Any:
    """Base of the frequencies: beside rope_scaling in transformers 4, in rope_parameters in 5."""
    for key in ("rope_scaling", "rope_parameters"):
        rope = config.get(key) or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise UserError(
                f"{where}: {key}: {json.dumps(rope)} is not supported; "
                'choose a model whose rope_type is "default"'
            )
    parameters = config.get("rope_parameters") or {}
    return parameters.get("rope_theta", config.get("rope_theta", 10000.0))


def config(architecture: Architecture, dtype: str, eos_token: int | None) -> dict[str, Any]:
    """The content of config.json, for transformers 4 and 5.

    Args:
        architecture: shape of the model, vocab_size filled in.
        dtype: torch's name of the weights' type, e.g. `bfloat16`.
        eos_token: token that ends a text; None says that there is none, for a missing key would
            mean token 2 to transformers.
    """
    shape = architecture.model_dump(exclude={"family"})
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **shape,
        "head_dim": architecture.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rope_parameters": {"rope_theta": architecture.rope_theta, "rope_type": "default"},
        "bos_token_id": None,
        "eos_token_id": eos_token,
        "torch_dtype": dtype,  # read by both; a `dtype` beside it would outlive a cast by version 4
    }


def write(
    path: Path,
    architecture: Architecture,
    tensors: Mapping[str, Tensor],
    *,
    eos_token: int | None = None,
    copies: Iterable[Path] = (),
) -> None:
    """Write a folder, whole or not at all.

    Args:
        path: folder; an existing one is replaced.
        architecture: shape of the model, vocab_size filled in.
        tensors: by Hugging Face's names, all of one dtype.
        eos_token: token that ends a text, if the model has one.
        copies: files put into the folder as they are, e.g. the tokenizer's.
    """
    checkpoint_tensors.check_names(tensors, checkpoint_tensors.shapes(architecture), str(path))
    dtype = str(checkpoint_tensors.common_dtype(tensors, str(path))).removeprefix("torch.")
    content = config(architecture, dtype, eos_token)
    own = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with files.atomic_folder(path, also=_TOKENIZER_FILES) as temporary:
        for file in copies:
            shutil.copyfile(file, temporary / file.name)
        files.write_json(temporary / "generation_config.json", {"eos_token_id": eos_token})
        files.write_json(temporary / "config.json", content)
        weights = temporary / "model.safetensors"
        save_file(own, weights, metadata={"format": "pt"})
        # safetensors hides its file from the group, whatever the umask says
        weights.chmod((temporary / "config.json").stat().st_mode & 0o777)
