"""Universal checkpoints of models with frozen parameters."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import llamas, megatron_names
from tests.support.random_tensors import random_tensors
from tokamake.checkpoint.convert import convert
from tokamake.checkpoint.detect import open_any
from tokamake.checkpoint.tensors.checkpoint import Progress
from tokamake.config.architecture import Architecture
from tokamake.errors import UserError

SHAPE = llamas.ARCHITECTURES[5]
"""Grouped queries, an untied output layer, and a padded vocabulary."""
TIED = llamas.ARCHITECTURES[7]
EMBEDDING = "language_model.embedding.word_embeddings.weight"
FUSED = "language_model.encoder.layers.1.self_attention.query_key_value.weight"
FROZEN = (EMBEDDING, FUSED, "language_model.encoder.layers.0.input_layernorm.weight")


def change(file: Path, **values: Any) -> None:
    torch.save({**torch.load(file, weights_only=False), **values}, file)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return universal_with_frozen(tmp_path, SHAPE)


def universal_with_frozen(tmp_path: Path, shape: Architecture) -> Path:
    """Write what ds_to_universal leaves: no folders of frozen parameters, files of both ranks."""
    megatron_names.write(
        tmp_path / "a", "universal", shape, random_tensors(shape, 1), Progress(4, 0, 0)
    )
    convert(source=tmp_path / "a", target=tmp_path / "b", format="mds", tensor_parallel_size=2)
    folder = tmp_path / "a/global_step4_universal"
    trained = {}
    for parameter in sorted((folder / "zero").glob("*/")):
        if parameter.name in FROZEN:
            shutil.rmtree(parameter)
        else:
            trained[parameter.name] = torch.Size([1])
    for file in (tmp_path / "b/global_step4").glob("mp_rank_*"):
        shutil.copy(file, folder)
        change(folder / file.name, param_shapes=[trained])
    return folder


@pytest.mark.parametrize("shape", [SHAPE, TIED], ids=["untied", "tied"])
def test_frozen_weights_are_read_from_the_files_of_the_ranks(
    shape: Architecture, tmp_path: Path
) -> None:
    folder = universal_with_frozen(tmp_path, shape)
    opened = open_any(folder)
    assert opened.architecture == shape
    for name, tensor in random_tensors(shape, 1).items():
        assert torch.equal(opened.source.read(f"model.{name}"), tensor), name
    convert(source=folder, target=tmp_path / "hf", format="hf")


def test_a_missing_trained_parameter_is_an_error(checkpoint: Path) -> None:
    for file in checkpoint.glob("mp_rank_*"):
        change(file, param_shapes=[{FUSED: torch.Size([1])}])
    with pytest.raises(UserError, match=f"zero: has no parameter {FUSED}; fetch or write"):
        open_any(checkpoint)
    for file in checkpoint.glob("mp_rank_*"):
        change(file, param_shapes=None)
    with pytest.raises(UserError, match=f"zero: has no parameter {EMBEDDING}; fetch or write"):
        open_any(checkpoint)


def test_missing_frozen_weights_are_an_error_with_the_reason(
    checkpoint: Path, tmp_path: Path
) -> None:
    shutil.rmtree(tmp_path / "b")
    convert(source=checkpoint, target=tmp_path / "b", format="universal")
    embedding = next((tmp_path / "b").glob("*_universal/zero")) / EMBEDDING
    shutil.copytree(embedding, checkpoint / "zero" / EMBEDDING)
    for file in checkpoint.glob("mp_rank_*"):
        change(file, module=None)
    match = "layernorm.weight, which was frozen: .* convert the checkpoint from which DeepSpeed"
    with pytest.raises(UserError, match=match):
        open_any(checkpoint)
