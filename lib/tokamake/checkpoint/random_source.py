"""The start of a new model: its architecture, and random weights as the source of a checkpoint."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tokamake.checkpoint import model_tensors
from tokamake.checkpoint.tensors.cast import Array
from tokamake.checkpoint.tensors.dtypes import FLOAT32, Dtype
from tokamake.checkpoint.tensors.extents import FileChunk, Slices, size_of, whole_slices
from tokamake.checkpoint.tensors.source import TensorSource
from tokamake.config.architecture import Architecture
from tokamake.config.architecture_files import read_architecture
from tokamake.data.tokenizers import open_tokenizer
from tokamake.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor


def new_architecture(path: Path, tokenizer: Path) -> Architecture:
    """Read the architecture of a new model; its tokenizer gives a missing vocab_size."""
    architecture, entries = read_architecture(path), open_tokenizer(tokenizer).vocab_size
    if architecture.vocab_size is None:
        return architecture.model_copy(update={"vocab_size": entries})
    check_vocab_size(architecture, entries, source=path)
    return architecture


def check_vocab_size(architecture: Architecture, entries: int, *, source: object) -> None:
    """Refuse a new model with fewer embeddings than the tokenizer has entries."""
    if architecture.vocab_size is not None and architecture.vocab_size < entries:
        raise UserError(
            f"{source}: vocab_size: {architecture.vocab_size} is less than the tokenizer's "
            f"{entries} entries; raise it or leave it out"
        )


class RandomSource(TensorSource):
    """Random weights in fp32. Tensors are drawn as they are read; none is kept in memory."""

    def __init__(self, architecture: Architecture, seed: int) -> None:
        super().__init__([], {})
        self.shapes = model_tensors.weight_shapes(architecture)
        self._weights = model_tensors.random_weights(architecture, seed)

    def dtype(self, key: str) -> Dtype:  # noqa: ARG002
        return FLOAT32

    def file_chunks(self, key: str) -> list[FileChunk]:  # noqa: ARG002
        return []

    def is_in_files(self, key: str) -> bool:  # noqa: ARG002
        return False

    def values(self, key: str, slices: Slices) -> Array:
        return self._draw(key, slices).view("V4")

    def read(self, key: str) -> "Tensor":
        import torch

        return torch.from_numpy(self._draw(key, whole_slices(self.shapes[key])))

    def _draw(self, key: str, slices: Slices) -> Array:
        drawn = np.empty(size_of(slices), np.float32)
        name = key.removeprefix("model.")
        for at, values in self._weights.tiles(name, self.shapes[key], place=slices):
            drawn[at] = values
        return drawn
