"""Universal checkpoints of models of which some parameters were not trained."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import llamas, megatron_names
from tokamake.checkpoint.convert import convert
from tokamake.checkpoint.detect import open_any
from tokamake.checkpoint.model_tensors import random
from tokamake.checkpoint.tensors.checkpoint import Progress
from tokamake.config.architecture import Architecture
from tokamake.errors import UserError

SHAPE = llamas.ARCHITECTURES[5]
"""Grouped queries, not tied, a vocabulary that is padded."""
TIED = llamas.ARCHITECTURES[7]
EMBEDDING = "language_model.embedding.word_embeddings.weight"
FUSED = "language_model.encoder.layers.1.self_attention.query_key_value.weight"
FROZEN = (EMBEDDING, FUSED, "language_model.encoder.layers.0.input_layernorm.weight")


def change(file: Path, **values: Any) -> None:
    """Put values into a file of torch.save."""
    torch.save({**torch.load(file, weights_only=False), **values}, file)


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """One of SHAPE."""
    return universal(tmp_path, SHAPE)


def universal(tmp_path: Path, shape: Architecture) -> Path:
    """As ds_to_universal leaves it: no folders of frozen parameters, files of both ranks."""
    megatron_names.write(tmp_path / "a", "universal", shape, random(shape, 1), Progress(4, 0, 0))
    convert(source=tmp_path / "a", target=tmp_path / "b", format="mds", tensor_parallel_size=2)
    folder = tmp_path / "a/global_step4_universal"
    trained = {}
    for each in sorted((folder / "zero").glob("*/")):
        if each.name in FROZEN:
            shutil.rmtree(each)
        else:
            trained[each.name] = torch.Size([1])
    for file in (tmp_path / "b/global_step4").glob("mp_rank_*"):
        shutil.copy(file, folder)
        change(folder / file.name, param_shapes=[trained])
    return folder


@pytest.mark.parametrize("shape", [SHAPE, TIED], ids=["untied", "tied"])
def test_frozen_weights_are_read_where_deepspeed_leaves_them(
    shape: Architecture, tmp_path: Path
) -> None:
    made = universal(tmp_path, shape)
    found = open_any(made)
    assert found.architecture == shape
    for name, tensor in random(shape, 1).items():
        assert torch.equal(found.source.read(f"model.{name}"), tensor), name
    convert(source=made, target=tmp_path / "hf", format="hf")


def test_a_parameter_that_was_trained_is_missing(made: Path) -> None:
    for file in made.glob("mp_rank_*"):
        change(file, param_shapes=[{FUSED: torch.Size([1])}])
    with pytest.raises(UserError, match=f"zero: has no parameter {FUSED}; fetch or write"):
        open_any(made)
    for file in made.glob("mp_rank_*"):
        change(file, param_shapes=None)
    with pytest.raises(UserError, match=f"zero: has no parameter {EMBEDDING}; fetch or write"):
        open_any(made)


def test_why_frozen_weights_are_nowhere_is_said(made: Path, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "b")
    convert(source=made, target=tmp_path / "b", format="universal")
    whole = next((tmp_path / "b").glob("*_universal/zero")) / EMBEDDING
    shutil.copytree(whole, made / "zero" / EMBEDDING)
    for file in made.glob("mp_rank_*"):
        change(file, module=None)
    match = "layernorm.weight, which was frozen: .* convert the checkpoint from which DeepSpeed"
    with pytest.raises(UserError, match=match):
        open_any(made)
