"""Folders of transformers, as its current and earlier versions write them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support import gpts, llamas
from tokamake.config.architecture import Architecture

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


def edited(edit: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    """Return a function that changes the tensors of a folder's model.safetensors."""

    def change(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "model.safetensors")

    return change
