"""How Megatron nests, fuses, pads and describes a model (checkpoint version 3.0), and back.

`megatron_deepspeed` writes and reads folders of it; tensors have our names, of `tensors`.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from tokamake.checkpoint import tensors as checkpoint_tensors
from tokamake.config import Architecture
from tokamake.models._hugging_face import fuse_by_group, split_by_group

Rows = slice | Tensor
"""Some rows of a tensor: one after the other, or by number."""

VOCABULARY_MULTIPLE = 128
"""Megatron's make_vocab_size_divisible_by: the embedding is padded to a multiple of it."""
_ONE_TO_ONE = {
    "input_layernorm": "input_layernorm",
    "self_attn.o_proj": "self_attention.dense",
    "post_attention_layernorm": "post_attention_layernorm",
    "mlp.down_proj": "mlp.dense_4h_to_h",
}
"""Modules of a layer that differ in name only: ours, Megatron's."""
_EMBEDDING = "language_model.embedding.word_embeddings.weight"
_KINDS = ("weight", "bias")
_ALL = slice(None)


def padded_vocab_size(architecture: Architecture) -> int:
    """Rows of Megatron's embedding."""
    assert architecture.vocab_size is not None, "fill in vocab_size before converting"
    return -(-architecture.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def to_megatron(architecture: Architecture, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Nest, fuse and pad tensors with our names into Megatron's `module`.

    Query, key and value become one matrix, whose rows are, for each key and value head in turn,
    its query heads, the key, the value. Gate and up projection are stacked. The vocabulary is
    padded with the mean of its rows. Tensors that do not change are not copied.
    """
    encoder: dict[str, Tensor] = {}
    for number in range(architecture.num_hidden_layers):
        for kind in _KINDS:
            encoder |= _layer_to_megatron(architecture, tensors, number, kind)
    encoder |= _renamed(tensors, "model.norm.", "final_layernorm.")
    words = {"weight": _pad(architecture, tensors["model.embed_tokens.weight"])}
    words |= _renamed(tensors, "model.embed_layernorm.", "norm.")
    embedding = {"word_embeddings": words}
    if positions := _renamed(tensors, "model.embed_positions.", ""):
        embedding["position_embeddings"] = positions
    model = {"embedding": embedding, "encoder": encoder}
    if not architecture.tie_word_embeddings:
        model["output_layer"] = {"weight": _pad(architecture, tensors["lm_head.weight"])}
    return {"language_model": model}


def _layer_to_megatron(
    architecture: Architecture, tensors: Mapping[str, Tensor], number: int, kind: str
) -> dict[str, Tensor]:
    """Weights or biases of a layer, of those modules that have them."""
    source, target = f"model.layers.{number}.", f"layers.{number}."
    found = {
        f"{target}{theirs}.{kind}": tensors[f"{source}{ours}.{kind}"]
        for ours, theirs in _ONE_TO_ONE.items()
        if f"{source}{ours}.{kind}" in tensors
    }
    if f"{source}self_attn.q_proj.{kind}" in tensors:
        qkv = [tensors[f"{source}self_attn.{part}_proj.{kind}"] for part in "qkv"]
        fused = fuse_by_group(architecture, qkv)
        found[f"{target}self_attention.query_key_value.{kind}"] = fused
    names = (f"{source}mlp.{part}_proj.{kind}" for part in ("gate", "up"))
    if wider := [tensors[name] for name in names if name in tensors]:
        stacked = torch.cat(wider) if len(wider) > 1 else wider[0]
        found[f"{target}mlp.dense_h_to_4h.{kind}"] = stacked
    return found


class Unfused(Mapping[str, Tensor]):
    """Tensors by our names; each is taken out of Megatron's when it is asked for.

    Queries, keys and values are copies, all others views.

    Attributes:
        stored: Megatron's tensors, by our names of what is in them.

    Args:
        rows: Megatron's tensors by our names, each with the rows of it that are meant.
    """

    def __init__(self, rows: Mapping[str, tuple[Tensor, Rows]]) -> None:
        self._rows = rows
        self.stored = {name: tensor for name, (tensor, _) in rows.items()}

    def __getitem__(self, name: str) -> Tensor:
        tensor, rows = self._rows[name]
        return tensor[rows]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


def from_megatron(architecture: Architecture, module: Any, where: str = "checkpoint") -> Unfused:
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
    names = checkpoint_tensors.shapes(architecture)
    qkv = _rows_of_qkv(architecture)
    found: dict[str, tuple[Tensor, Rows]] = {}
    for number in range(architecture.num_hidden_layers):
        gated = f"model.layers.{number}.mlp.gate_proj.weight" in names
        for kind in _KINDS:
            found |= _layer_from_megatron(qkv, flat, number, kind, gated=gated)
    embedding = "language_model.embedding."
    for theirs, ours in (
        ("language_model.encoder.final_layernorm.", "model.norm."),
        (f"{embedding}word_embeddings.norm.", "model.embed_layernorm."),
        (f"{embedding}position_embeddings.", "model.embed_positions."),
    ):
        found |= {name: (tensor, _ALL) for name, tensor in _renamed(flat, theirs, ours).items()}
    words = slice(architecture.vocab_size)
    found["model.embed_tokens.weight"] = flat[_EMBEDDING], words
    if not architecture.tie_word_embeddings:
        found["lm_head.weight"] = flat["language_model.output_layer.weight"], words
    return Unfused({name: found[name] for name in names})


def _rows_of_qkv(architecture: Architecture) -> list[Tensor]:
    """Numbers of the rows of query_key_value that are queries, keys and values."""
    width = architecture.num_key_value_heads * architecture.head_dim
    return split_by_group(architecture, torch.arange(architecture.hidden_size + 2 * width))


def _layer_from_megatron(
    qkv: list[Tensor], flat: Mapping[str, Tensor], number: int, kind: str, *, gated: bool
) -> dict[str, tuple[Tensor, Rows]]:
    source, target = f"language_model.encoder.layers.{number}.", f"model.layers.{number}."
    found: dict[str, tuple[Tensor, Rows]] = {
        f"{target}{ours}.{kind}": (flat[f"{source}{theirs}.{kind}"], _ALL)
        for ours, theirs in _ONE_TO_ONE.items()
        if f"{source}{theirs}.{kind}" in flat
    }
    fused = flat.get(f"{source}self_attention.query_key_value.{kind}")
    if fused is not None:
        for part, rows in zip("qkv", qkv, strict=True):
            found[f"{target}self_attn.{part}_proj.{kind}"] = fused, rows
    stacked = flat.get(f"{source}mlp.dense_h_to_4h.{kind}")
    if stacked is not None:
        parts = ("gate", "up") if gated else ("up",)
        size = len(stacked) // len(parts)
        for place, part in enumerate(parts):
            half = slice(place * size, (place + 1) * size)
            found[f"{target}mlp.{part}_proj.{kind}"] = stacked, half
    return found


def _renamed(tensors: Mapping[str, Tensor], before: str, after: str) -> dict[str, Tensor]:
    """Those whose names begin so, with another beginning."""
    return {
        after + name.removeprefix(before): tensor
        for name, tensor in tensors.items()
        if name.startswith(before)
    }


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
