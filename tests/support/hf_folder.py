"""Hugging Face folders as whole tensors in memory, by tokamake's names."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tokamake import files
from tokamake.checkpoint import model_tensors
from tokamake.checkpoint.hf import format as hf_format
from tokamake.checkpoint.tensors.checkpoint import Checkpoint, Target
from tokamake.checkpoint.tensors.copy import fill
from tokamake.checkpoint.tensors.source import TensorSource
from tokamake.config.architecture import Architecture

if TYPE_CHECKING:
    from torch import Tensor


def read(folder: Path) -> "tuple[Architecture, dict[str, Tensor]]":
    """Read a folder: architecture, and tensors by tokamake's names."""
    checkpoint = hf_format.open_checkpoint(folder)
    source = checkpoint.source
    tensors = {key.removeprefix("model."): source.read(key).contiguous() for key in source}
    return checkpoint.architecture, tensors


def write(folder: Path, architecture: Architecture, tensors: "Mapping[str, Tensor]") -> None:
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
