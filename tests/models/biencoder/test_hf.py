"""biencoder in folders of Hugging Face's format and in Megatron's formats."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support import berts, hf_folder, megatron_names
from tests.support.biencoders import ARCHITECTURES, ENCODER, biencoder
from tests.support.megatron_names import leaves, megatron_tensors
from tests.support.random_tensors import random_tensors
from tokamake.checkpoint import writer
from tokamake.checkpoint.detect import open_any
from tokamake.checkpoint.tensors.checkpoint import ParallelLayout, Target
from tokamake.config.architecture import Architecture
from tokamake.errors import UserError
from tokamake.models.biencoder.hf import towers

SHAPE = ARCHITECTURES["biencoder"]


def tower_of(architecture: Architecture, tensors: dict[str, Any], name: str) -> dict[str, Any]:
    """Tensors of a tower, by the names of a BERT's."""
    start = f"model.{name}."
    return {f"model.{k.removeprefix(start)}": t for k, t in tensors.items() if k.startswith(start)}


def test_the_folder_has_a_bert_of_transformers_for_each_tower(tmp_path: Path) -> None:
    tensors = random_tensors(SHAPE, 1)
    hf_folder.write(tmp_path / "a", SHAPE, tensors)
    stored = load_file(tmp_path / "a/model.safetensors")
    bert = berts.bert(**{k: v for k, v in ENCODER.items() if k != "family"})
    expected = {}
    for name in towers(SHAPE):
        for theirs, tensor in hf_folder.to_hf(bert, tower_of(SHAPE, tensors, name)).items():
            own = theirs.removeprefix("bert.").replace("projection.", "projection_enc.")
            expected[f"{name}.{own}"] = tensor
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in expected.items())


def megatrons(architecture: Architecture, tensors: dict[str, Any]) -> dict[str, Any]:
    """Tensors of a whole model by Megatron's dotted names."""
    result = {}
    for name in towers(architecture):
        own = tower_of(architecture, tensors, name)
        tower = megatron_tensors(architecture, own)
        if "model.embed_token_types.weight" in own:
            types = "language_model.embedding.tokentype_embeddings.weight"
            tower[types] = own["model.embed_token_types.weight"]
        for kind in ("weight", "bias"):
            if f"model.projection.{kind}" in own:
                tower[f"projection_enc.{kind}"] = own[f"model.projection.{kind}"]
        result |= {f"{name}.{key}": tensor for key, tensor in tower.items()}
    return result


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("width", [0, 24])
def test_tensors_and_arguments_are_megatrons(shared: bool, width: int, tmp_path: Path) -> None:
    shape = biencoder(shared_towers=shared, projection_dim=width, hidden_act="gelu_new")
    tensors = random_tensors(shape, 3)
    megatron_names.write(tmp_path / "m", "megatron", shape, tensors)
    (file,) = tmp_path.rglob("*.pt")
    state = torch.load(file, weights_only=False)
    stored, expected = leaves(state["model"]), megatrons(shape, tensors)
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in expected.items())
    args = vars(state["args"])
    assert args["biencoder_shared_query_context_model"] is shared
    assert args["biencoder_projection_dim"] == width
    # As Megatron's pretrain_ict writes it.
    megatron_names.remove_tokamake_arguments(tmp_path / "m")
    checkpoint = open_any(tmp_path / "m")
    assert checkpoint.architecture == shape.model_copy(update={"vocab_size": 131})
    for name, tensor in tensors.items():
        assert torch.equal(checkpoint.source.read(f"model.{name}")[: len(tensor)], tensor), name


@pytest.mark.parametrize(
    ("kind", "layout", "message"),
    [
        ("torch_dist", ParallelLayout(), "megatron.core has no model of family biencoder; choose"),
        ("mds_pipeline", ParallelLayout(), "has no pipeline of a biencoder; choose mds, meg"),
        ("megatron", ParallelLayout(1, 3), "stages of a model with two towers are not supp"),
    ],
)
def test_formats_without_towers_are_refused(
    kind: str, layout: ParallelLayout, message: str, tmp_path: Path
) -> None:
    hf_folder.write(tmp_path / "a", SHAPE, random_tensors(SHAPE, 1))
    with pytest.raises(UserError, match=message):
        writer.write(tmp_path / "there", open_any(tmp_path / "a"), kind, Target(layout))
