"""Megatron's tensors of a model, built head by head: an oracle for the checkpoint formats."""

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokamake.checkpoint import writer
from tokamake.checkpoint.tensors.checkpoint import Checkpoint, Progress, Target
from tokamake.checkpoint.tensors.source import TensorSource
from tokamake.config.architecture import Architecture

KINDS = ("weight", "bias")
_MODULES = {
    "input_layernorm": "input_layernorm",
    "self_attn.o_proj": "self_attention.dense",
    "post_attention_layernorm": "post_attention_layernorm",
    "mlp.down_proj": "mlp.dense_4h_to_h",
}
"""Modules of a layer that differ only in their names: Hugging Face's and Megatron's."""


def megatron_tensors(
    architecture: Architecture, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Megatron's tensors on a single rank by dotted names, from those with Hugging Face's names."""
    model = "language_model."
    result = {
        f"{model}encoder.layers.{number}.{name}": tensor
        for number in range(architecture.num_hidden_layers)
        for name, tensor in _layer(architecture, tensors, f"model.layers.{number}.")
    }
    embedding = f"{model}embedding.word_embeddings."
    renamed = {f"model.norm.{kind}": f"{model}encoder.final_layernorm.{kind}" for kind in KINDS}
    renamed |= {f"model.embed_layernorm.{kind}": f"{embedding}norm.{kind}" for kind in KINDS}
    renamed["model.embed_positions.weight"] = f"{model}embedding.position_embeddings.weight"
    result |= {renamed[name]: tensor for name, tensor in tensors.items() if name in renamed}
    result[f"{embedding}weight"] = _padded(tensors["model.embed_tokens.weight"])
    if not architecture.tie_word_embeddings:
        result[f"{model}output_layer.weight"] = _padded(tensors["lm_head.weight"])
    return result


def _layer(
    architecture: Architecture, tensors: Mapping[str, Tensor], layer: str
) -> Iterator[tuple[str, Tensor]]:
    for kind in KINDS:
        for hf, megatron in _MODULES.items():
            if f"{layer}{hf}.{kind}" in tensors:
                yield f"{megatron}.{kind}", tensors[f"{layer}{hf}.{kind}"]
        if f"{layer}self_attn.q_proj.{kind}" in tensors:
            rows = [
                tensors[f"{layer}self_attn.{matrix}_proj.{kind}"][row]
                for matrix, row in rows_of_fused(architecture)
            ]
            yield f"self_attention.query_key_value.{kind}", torch.stack(rows)
        names = [f"{layer}mlp.{matrix}_proj.{kind}" for matrix in ("gate", "up")]
        if projections := [tensors[name] for name in names if name in tensors]:
            yield f"mlp.dense_h_to_4h.{kind}", torch.cat(projections)


def rows_of_fused(architecture: Architecture) -> list[tuple[str, int]]:
    """Return the matrix (q, k or v) and the row in it for each row of query_key_value."""
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
    """Pad to a multiple of 128 rows with the mean of all rows."""
    mean = rows.double().mean(dim=0, keepdim=True).float().to(rows.dtype)
    return torch.cat([rows, *[mean] * (-len(rows) % 128)])


def in_memory(
    architecture: Architecture, tensors: Mapping[str, Tensor], progress: Progress | None = None
) -> Checkpoint:
    """Return a checkpoint of tensors in memory, by Hugging Face's names."""
    source = TensorSource(
        [], {}, in_memory={f"model.{name}": tensor for name, tensor in tensors.items()}
    )
    return Checkpoint("test", Path("memory"), architecture, source, progress=progress or Progress())


def write(
    folder: Path,
    name: str,
    architecture: Architecture,
    tensors: Mapping[str, Tensor],
    progress: Progress | None = None,
) -> None:
    """Write a checkpoint of a format for a single rank, from weights by Hugging Face's names."""
    writer.write(folder, in_memory(architecture, tensors, progress), name, Target())


def remove_tokamake_arguments(folder: Path, **changes: Any) -> None:
    """Remove the argument `tokamake`, which Megatron does not write; set or remove others."""
    for file in folder.rglob("*.pt"):
        state = torch.load(file, weights_only=False)
        if not isinstance(state, dict) or "args" not in state:
            continue
        args = {**vars(state["args"]), "tokamake": None, **changes}
        args = {name: value for name, value in args.items() if value is not None}
        state["args"] = argparse.Namespace(**args)
        torch.save(state, file)


def leaves(tree: Any, prefix: str = "") -> dict[str, Tensor]:
    """Tensors of a nested module by their dotted names."""
    if isinstance(tree, Tensor):
        return {prefix.removesuffix("."): tree}
    return {
        name: leaf
        for key, value in tree.items()
        for name, leaf in leaves(value, f"{prefix}{key}.").items()
    }
