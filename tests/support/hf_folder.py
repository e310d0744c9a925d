"""Folders and tensors in Hugging Face's formats, also those of earlier transformers."""

import json
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support import gpts, llamas
from tokamake import files
from tokamake.checkpoint import model_tensors
from tokamake.checkpoint.hf import config_json
from tokamake.checkpoint.hf import format as hf_format
from tokamake.checkpoint.tensors.checkpoint import Checkpoint, Target
from tokamake.checkpoint.tensors.copy import fill
from tokamake.checkpoint.tensors.source import TensorSource
from tokamake.config.architecture import Architecture


def read(folder: Path) -> tuple[Architecture, dict[str, Tensor]]:
    """Read a folder: architecture, and tensors by tokamake's names."""
    checkpoint = hf_format.open_checkpoint(folder)
    source = checkpoint.source
    tensors = {key.removeprefix("model."): source.read(key).contiguous() for key in source}
    return checkpoint.architecture, tensors


def write(folder: Path, architecture: Architecture, tensors: Mapping[str, Tensor]) -> None:
    """Write a folder atomically, from tensors by tokamake's names; an existing one is replaced.

    Raises:
        UserError: transformers has no such model, or the tensors do not fit the architecture.
    """
    expected, where = model_tensors.shapes(architecture), str(folder)
    model_tensors.check_names(tensors, expected, where=where)
    for name, shape in expected.items():
        model_tensors.check_shape(name, tensors[name].shape, expected=shape, where=where)
    in_memory = {f"model.{name}": tensor.detach().cpu() for name, tensor in tensors.items()}
    source = TensorSource([], {}, in_memory=in_memory)
    target = Target(max_shard_bytes=sys.maxsize)
    with files.atomic_folder(folder) as temporary:
        checkpoint = Checkpoint("hf", temporary, architecture, source)
        extents = hf_format.lay_out(temporary, checkpoint, target=target)
        for _ in fill(extents, source, keys=source):
            pass


def to_hf(architecture: Architecture, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename, fuse and transpose tensors of tokamake."""
    model_format = config_json.format_for(architecture)
    ranges: dict[str, dict[int, Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        for rows, start in model_format.rows(architecture, name, len(tensor)):
            for stored_name, index in model_format.stored_names(name, tensor.shape):
                part = tensor if index is None else tensor[index]
                ranges[stored_name][start] = part[rows] if index is None else part
    stored = {
        name: torch.cat([rows for _, rows in sorted(parts.items())])
        for name, parts in ranges.items()
    }
    for name in {model_format.name(name) for name in tensors if model_format.is_transposed(name)}:
        stored[name] = stored[name].mT
    stored |= {name: stored[name][None] for name in model_format.as_rows.values()}
    return stored | {
        name: stored[model_format.name(ours)] for name, ours in model_format.twice.items()
    }


def from_hf(architecture: Architecture, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tokamake's tensors, contiguous."""
    model_format, tensors = config_json.format_for(architecture), dict[str, Tensor]()
    for name, shape in model_tensors.shapes(architecture).items():
        names = model_format.stored_names(name, shape)
        parts = [stored[each] for each, _ in names]
        tensor = parts[0] if names[0][1] is None else torch.stack(parts)
        tensor = tensor.mT if model_format.is_transposed(name) else tensor
        tensor = tensor[0] if name in model_format.as_rows else tensor
        ranges = model_format.rows(architecture, name, shape[0])
        tensors[name] = torch.cat(
            [tensor[start : start + rows.stop - rows.start] for rows, start in ranges]
        )
    return tensors


SHARD = 20_000
"""Bytes of a shard, so that there are several."""


def reference(architecture: Architecture, dtype: torch.dtype = torch.float32) -> Any:
    family = llamas if architecture.family == "llama" else gpts
    return family.reference(architecture, dtype)


def pickled(folder: Path, *, shards: int = 1) -> None:
    """Turn a folder of transformers' into one of earlier versions."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    if shards == 1:
        torch.save(tensors, folder / "pytorch_model.bin")
        return
    file_of = {
        name: f"pytorch_model-{number % shards + 1:05}-of-{shards:05}.bin"
        for number, name in enumerate(tensors)
    }
    for file in set(file_of.values()):
        own = {name: each for name, each in tensors.items() if file_of[name] == file}
        torch.save(own, folder / file)
    index = {"metadata": {}, "weight_map": file_of}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def edited(edit: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], None]:
    """Return a function that changes the tensors of a folder's model.safetensors."""

    def change(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "model.safetensors")

    return change
