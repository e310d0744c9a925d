"""Megatron-DeepSpeed's checkpoint folder without pipelining, at tensor-parallel size 1.

`import_hf` and, through DeepSpeed, the trainer write it; the trainer and `export_hf` read it.
`latest` names a folder global_step<N>, whose mp_rank_00_model_states.pt holds the weights, nested
and fused as Megatron has them (checkpoint version 3.0), and the arguments.
"""

import argparse
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokamake import files
from tokamake.checkpoint import tensors as checkpoint_tensors
from tokamake.config import Architecture
from tokamake.errors import UserError
from tokamake.validation import validate

VOCABULARY_MULTIPLE = 128
"""Megatron's make_vocab_size_divisible_by: the embedding is padded to a multiple of it."""
_REMEDY = "import or train the checkpoint again"
_STATES = "mp_rank_00_model_states.pt"
_ONE_TO_ONE = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attn.o_proj.weight": "self_attention.dense.weight",
    "post_attention_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.down_proj.weight": "mlp.dense_4h_to_h.weight",
}
"""Tensors of a layer that differ in name only: Hugging Face's, Megatron's."""
_EMBEDDING = "language_model.embedding.word_embeddings.weight"


def padded_vocab_size(architecture: Architecture) -> int:
    """Rows of Megatron's embedding."""
    assert architecture.vocab_size is not None, "fill in vocab_size before converting"
    return -(-architecture.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def to_megatron(architecture: Architecture, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Nest, fuse and pad tensors with Hugging Face's names into Megatron's `module`.

    Query, key and value become one matrix, whose rows are, for each key and value head in turn,
    its query heads, the key, the value. Gate and up projection are stacked. The vocabulary is
    padded with the mean of its rows. Tensors that do not change are not copied.
    """
    encoder: dict[str, Tensor] = {}
    for number in range(architecture.num_hidden_layers):
        source, target = f"model.layers.{number}.", f"layers.{number}."
        for theirs, ours in _ONE_TO_ONE.items():
            encoder[target + ours] = tensors[source + theirs]
        q, k, v = (tensors[f"{source}self_attn.{part}_proj.weight"] for part in "qkv")
        encoder[f"{target}self_attention.query_key_value.weight"] = _fuse(architecture, q, k, v)
        gate, up = (tensors[f"{source}mlp.{part}_proj.weight"] for part in ("gate", "up"))
        encoder[f"{target}mlp.dense_h_to_4h.weight"] = torch.cat((gate, up))
    encoder["final_layernorm.weight"] = tensors["model.norm.weight"]
    embedding = _pad(architecture, tensors["model.embed_tokens.weight"])
    model = {"embedding": {"word_embeddings": {"weight": embedding}}, "encoder": encoder}
    if not architecture.tie_word_embeddings:
        model["output_layer"] = {"weight": _pad(architecture, tensors["lm_head.weight"])}
    return {"language_model": model}


def from_megatron(
    architecture: Architecture, module: Any, where: str = "checkpoint"
) -> dict[str, Tensor]:
    """Take Megatron's `module` apart again: the inverse of `to_megatron`, bit by bit.

    Args:
        architecture: shape of the model with its true, unpadded vocab_size.
        module: nested dictionary, as `to_megatron` returns it.
        where: file named in messages.

    Raises:
        UserError: a tensor is missing, unknown or of a shape that does not fit the architecture.
    """
    flat = _flatten(module)
    _check(architecture, flat, where)
    tensors: dict[str, Tensor] = {}
    for number in range(architecture.num_hidden_layers):
        source, target = f"language_model.encoder.layers.{number}.", f"model.layers.{number}."
        for theirs, ours in _ONE_TO_ONE.items():
            tensors[target + theirs] = flat[source + ours]
        fused = flat[f"{source}self_attention.query_key_value.weight"]
        for part, tensor in zip("qkv", _unfuse(architecture, fused), strict=True):
            tensors[f"{target}self_attn.{part}_proj.weight"] = tensor
        gate, up = flat[f"{source}mlp.dense_h_to_4h.weight"].chunk(2)
        tensors |= {f"{target}mlp.gate_proj.weight": gate, f"{target}mlp.up_proj.weight": up}
    tensors["model.norm.weight"] = flat["language_model.encoder.final_layernorm.weight"]
    rows = architecture.vocab_size
    tensors["model.embed_tokens.weight"] = flat[_EMBEDDING][:rows]
    if not architecture.tie_word_embeddings:
        tensors["lm_head.weight"] = flat["language_model.output_layer.weight"][:rows]
    return {name: tensors[name] for name in checkpoint_tensors.shapes(architecture)}


def _fuse(architecture: Architecture, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    by_group = (architecture.num_key_value_heads, -1, architecture.hidden_size)
    return torch.cat([part.reshape(by_group) for part in (q, k, v)], dim=1).flatten(0, 1)


def _unfuse(architecture: Architecture, fused: Tensor) -> list[Tensor]:
    groups, head = architecture.num_key_value_heads, architecture.head_dim
    queries = architecture.hidden_size // groups
    grouped = fused.unflatten(0, (groups, queries + 2 * head))
    return [part.flatten(0, 1) for part in grouped.split((queries, head, head), dim=1)]


def _pad(architecture: Architecture, rows: Tensor) -> Tensor:
    missing = padded_vocab_size(architecture) - rows.shape[0]
    if missing == 0:
        return rows
    mean = rows.float().mean(dim=0, keepdim=True).to(rows.dtype)
    return torch.cat((rows, mean.expand(missing, -1)))


def _flatten(module: Any, prefix: str = "") -> dict[str, Tensor]:
    flat: dict[str, Tensor] = {}
    for key, value in module.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _check(architecture: Architecture, flat: dict[str, Tensor], where: str) -> None:
    """Compare names and shapes with what `to_megatron` makes of this architecture."""
    names = checkpoint_tensors.shapes(architecture)
    empty = {name: torch.empty(shape, device="meta") for name, shape in names.items()}
    wanted = _flatten(to_megatron(architecture, empty))
    checkpoint_tensors.check_names(flat, wanted, where)
    for name, tensor in wanted.items():
        checkpoint_tensors.check_shape(name, flat[name].shape, tensor.shape, where)


def client_state(architecture: Architecture, iteration: int = 0, tokens: int = 0) -> dict[str, Any]:
    """What Megatron adds to DeepSpeed's part of the file; pass it to `engine.save_checkpoint`.

    Args:
        architecture: shape of the model; kept whole in `args.tokamake`, beside Megatron's names.
        iteration: steps trained.
        tokens: tokens trained on.
    """
    shape = architecture
    arguments = argparse.Namespace(
        num_layers=shape.num_hidden_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.intermediate_size,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        kv_channels=shape.head_dim,
        max_position_embeddings=shape.max_position_embeddings,
        seq_length=shape.max_position_embeddings,
        vocab_size=shape.vocab_size,
        padded_vocab_size=padded_vocab_size(shape),
        make_vocab_size_divisible_by=VOCABULARY_MULTIPLE,
        untie_embeddings_and_output_weights=not shape.tie_word_embeddings,
        add_position_embedding=False,
        use_rotary_position_embeddings=True,
        rotary_percent=1.0,
        rope_theta=shape.rope_theta,
        normalization="rmsnorm",
        layernorm_epsilon=shape.rms_norm_eps,
        swiglu=True,
        add_bias_linear=False,
        init_method_std=shape.initializer_range,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        no_pipeline_parallel=True,
        consumed_train_tokens=tokens,
        tokamake=shape.model_dump(),
    )
    return {
        "args": arguments,
        "checkpoint_version": 3.0,
        "iteration": iteration,
        "tokens": tokens,
    }


def write(path: Path, architecture: Architecture, tensors: Mapping[str, Tensor]) -> None:
    """Write the folder of a run that has not begun: global_step0, whole or not at all.

    Args:
        path: folder; an existing one is replaced.
        architecture: shape of the model, vocab_size filled in.
        tensors: by Hugging Face's names, all of one dtype.
    """
    checkpoint_tensors.common_dtype(tensors, str(path))
    state = {
        "module": to_megatron(architecture, tensors),
        "dp_world_size": 1,
        "mp_world_size": 1,
        "global_steps": 0,
        **client_state(architecture),
    }
    with files.atomic_folder(path) as temporary:
        (temporary / "global_step0").mkdir()
        torch.save(state, temporary / "global_step0" / _STATES)
        files.write_text(temporary / "latest_checkpointed_iteration.txt", "0")
        files.write_text(temporary / "latest", "global_step0")


def read(path: Path) -> tuple[Architecture, dict[str, Tensor], int]:
    """Read the checkpoint that `latest` names.

    Returns:
        Architecture, tensors by Hugging Face's names, and iteration. What fusing did not move is
        backed by the memory-mapped file.

    Raises:
        UserError: a file is missing or damaged, or its tensors do not fit its architecture.
    """
    file = path / _latest(path) / _STATES
    state = _load(file)
    described = getattr(state.get("args"), "tokamake", None)
    if described is None or not isinstance(state.get("module"), dict):
        raise UserError(
            f"{file}: no args.tokamake or no weights in it: tokamake did not write it, or it was "
            f"saved with pipeline parallelism; {_REMEDY}"
        )
    architecture = validate(Architecture, described, f"{file}: args.tokamake")
    tensors = from_megatron(architecture, state["module"], str(file))
    checkpoint_tensors.common_dtype(tensors, str(file))
    return architecture, tensors, int(state.get("iteration", 0))


def _latest(path: Path) -> str:
    pointer = path / "latest"
    try:
        name = pointer.read_text(encoding="utf-8", errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"{pointer}: no such file, so no checkpoint is finished; {_REMEDY}"
        ) from None
    if not name or Path(name).name != name:
        raise UserError(f"{pointer}: {name!r} is not the name of a folder; {_REMEDY}")
    return name


def _load(file: Path) -> dict[str, Any]:
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            state: Any = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except FileNotFoundError:
        raise UserError(
            f"{file}: no such file, though latest names its folder; {_REMEDY}"
        ) from None
    except pickle.UnpicklingError as error:
        reason = str(error).split("\n")[0]
        raise UserError(
            f"{file}: holds more than tensors and plain values ({reason}); {_REMEDY}"
        ) from None
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        reason = str(error).split("\n")[0]
        raise UserError(f"{file}: damaged ({reason}); {_REMEDY}") from None
    if not isinstance(state, dict):
        raise UserError(f"{file}: holds no checkpoint but a {type(state).__name__}; {_REMEDY}")
    return state
