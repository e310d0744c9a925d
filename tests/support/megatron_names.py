"""What Megatron has of a model, spelled out head by head: an oracle for the formats of its kin."""

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokamake.checkpoint import writer
from tokamake.checkpoint.tensors.checkpoint import Checkpoint, Progress, Target
from tokamake.checkpoint.tensors.extents import TensorSource
from tokamake.config.architecture import Architecture

KINDS = ("weight", "bias")
_MODULES = {
    "input_layernorm": "input_layernorm",
    "self_attn.o_proj": "self_attention.dense",
    "post_attention_layernorm": "post_attention_layernorm",
    "mlp.down_proj": "mlp.dense_4h_to_h",
}
"""Of a layer, ours and Megatron's, where they differ in name only."""


def whole(architecture: Architecture, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Megatron's tensors of one rank by their names with dots, of those with our names."""
    model = "language_model."
    found = {
        f"{model}encoder.layers.{number}.{name}": tensor
        for number in range(architecture.num_hidden_layers)
        for name, tensor in _layer(architecture, tensors, f"model.layers.{number}.")
    }
    embedding = f"{model}embedding.word_embeddings."
    renamed = {f"model.norm.{kind}": f"{model}encoder.final_layernorm.{kind}" for kind in KINDS}
    renamed |= {f"model.embed_layernorm.{kind}": f"{embedding}norm.{kind}" for kind in KINDS}
    renamed["model.embed_positions.weight"] = f"{model}embedding.position_embeddings.weight"
    found |= {renamed[name]: tensor for name, tensor in tensors.items() if name in renamed}
    found[f"{embedding}weight"] = _padded(tensors["model.embed_tokens.weight"])
    if not architecture.tie_word_embeddings:
        found[f"{model}output_layer.weight"] = _padded(tensors["lm_head.weight"])
    return found


def _layer(
    architecture: Architecture, tensors: Mapping[str, Tensor], layer: str
) -> Iterator[tuple[str, Tensor]]:
    for kind in KINDS:
        for ours, theirs in _MODULES.items():
            if f"{layer}{ours}.{kind}" in tensors:
                yield f"{theirs}.{kind}", tensors[f"{layer}{ours}.{kind}"]
        if f"{layer}self_attn.q_proj.{kind}" in tensors:
            rows = rows_of_fused(architecture)
            each = [tensors[f"{layer}self_attn.{part}_proj.{kind}"][row] for part, row in rows]
            yield f"self_attention.query_key_value.{kind}", torch.stack(each)
        names = [f"{layer}mlp.{part}_proj.{kind}" for part in ("gate", "up")]
        if wider := [tensors[name] for name in names if name in tensors]:
            yield f"mlp.dense_h_to_4h.{kind}", torch.cat(wider)


def rows_of_fused(architecture: Architecture) -> list[tuple[str, int]]:
    """Which matrix and row each row of query_key_value is."""
    width = architecture.head_dim
    per_group = architecture.num_attention_heads // architecture.num_key_value_heads
    rows = []
    for group in range(architecture.num_key_value_heads):
        for query in range(per_group):
            rows += [("q", (group * per_group + query) * width + i) for i in range(width)]
        rows += [("k", group * width + i) for i in range(width)]
        rows += [("v", group * width + i) for i in range(width)]
    return rows


def _padded(rows: Tensor) -> Tensor:
    """With the mean of all rows, up to a multiple of 128."""
    mean = rows.double().mean(dim=0, keepdim=True).float().to(rows.dtype)
    return torch.cat([rows, *[mean] * (-len(rows) % 128)])


def opened(
    architecture: Architecture, tensors: Mapping[str, Tensor], progress: Progress | None = None
) -> Checkpoint:
    """A checkpoint of tensors with our names that lies in no file."""
    source = TensorSource([], {}, {f"model.{name}": tensor for name, tensor in tensors.items()})
    return Checkpoint("test", Path("memory"), architecture, source, progress=progress or Progress())


def write(
    folder: Path,
    name: str,
    architecture: Architecture,
    tensors: Mapping[str, Tensor],
    progress: Progress | None = None,
) -> None:
    """Write a checkpoint of tensors with our names, of one rank.

    Args:
        folder: to make.
        name: of the format's plug-in.
        architecture: shape of the model.
        tensors: what to write.
        progress: how far it has come.
    """
    writer.write(folder, opened(architecture, tensors, progress), name, Target())


def as_others_write(folder: Path, **changes: Any) -> None:
    """Take what only tokamake writes out of a checkpoint's arguments, and change some.

    Args:
        folder: of the checkpoint.
        changes: arguments; None takes one out.
    """
    for file in folder.rglob("*.pt"):
        state = torch.load(file, weights_only=False)
        if not isinstance(state, dict) or "args" not in state:
            continue
        known = {**vars(state["args"]), "tokamake": None, **changes}
        kept = {name: value for name, value in known.items() if value is not None}
        state["args"] = argparse.Namespace(**kept)
        torch.save(state, file)
