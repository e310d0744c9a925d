"""bert in transformers' folders and in Megatron's formats: read, written, refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support import hf_folder, megatron_names
from tests.support.berts import (
    ARCHITECTURES,
    MIXED,
    bert,
)
from tests.support.random_tensors import random_tensors
from tokamake.checkpoint import writer
from tokamake.checkpoint.detect import open_any
from tokamake.checkpoint.hf import config_json
from tokamake.checkpoint.tensors.checkpoint import Target
from tokamake.errors import UserError

SHAPE = ARCHITECTURES["bert"]


def test_a_config_without_an_epsilon_means_that_of_transformers(config: Path) -> None:
    values = json.loads(config.read_text())
    del values["layer_norm_eps"]
    config.write_text(json.dumps(values))
    assert config_json.read_config(config.parent)[0].layer_norm_epsilon == 1e-12


def test_stored_copies_of_tied_tensors_have_to_be_equal(config: Path) -> None:
    file = config.with_name("model.safetensors")
    tensors = load_file(file)
    bias = tensors["cls.predictions.bias"]
    embedding = tensors["bert.embeddings.word_embeddings.weight"]
    copies = {
        "cls.predictions.decoder.weight": embedding.clone(),
        "cls.predictions.decoder.bias": bias.clone(),
        "bert.embeddings.position_ids": torch.arange(64)[None],
    }
    save_file(tensors | copies, file)
    _, read = hf_folder.read(config.parent)
    assert torch.equal(read["model.masked_token_head.bias"], bias)
    for name in list(copies)[:2]:
        save_file(tensors | copies | {name: copies[name] + 1}, file)
        with pytest.raises(UserError, match=rf"tensor {name} differs from"):
            hf_folder.read(config.parent)


def test_heads_have_no_prefix_beside_a_base_model_without_one(config: Path) -> None:
    file = config.with_name("model.safetensors")
    _, expected = hf_folder.read(config.parent)
    save_file({n.removeprefix("bert."): t for n, t in load_file(file).items()}, file)
    _, read = hf_folder.read(config.parent)
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in expected.items())


def test_a_pipeline_of_megatron_deepspeed_is_refused(config: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no pipeline of a bert; choose mds, megatron or"):
        writer.write(tmp_path / "there", open_any(config.parent), "mds_pipeline", Target())


def megatron_names_of(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Heads and embeddings by Megatron's names, whole."""
    embedding = "language_model.embedding."
    names = {
        f"{embedding}position_embeddings.weight": "model.embed_positions.weight",
        f"{embedding}tokentype_embeddings.weight": "model.embed_token_types.weight",
    }
    for kind in ("weight", "bias"):
        names |= {
            f"language_model.encoder.final_layernorm.{kind}": f"model.norm.{kind}",
            f"language_model.pooler.dense.{kind}": f"model.pooler.{kind}",
            f"lm_head.dense.{kind}": f"model.masked_token_head.dense.{kind}",
            f"lm_head.layernorm.{kind}": f"model.masked_token_head.layernorm.{kind}",
            f"binary_head.{kind}": f"model.sentence_order_head.{kind}",
        }
    return {theirs: tensors[ours] for theirs, ours in names.items()}


@pytest.mark.parametrize(
    "shape", [SHAPE, MIXED, bert(sentence_order_head=False, type_vocab_size=0)], ids=range(3)
)
def test_tensors_and_arguments_are_megatrons(shape: Any, tmp_path: Path) -> None:
    tensors = random_tensors(shape, 3)
    tensors["model.masked_token_head.bias"] = torch.arange(131.0)
    megatron_names.write(tmp_path / "m", "megatron", shape, tensors)
    (file,) = tmp_path.rglob("*.pt")
    state = torch.load(file, weights_only=False)
    model = state["model"]
    assert {*model} <= {"language_model", "lm_head", "binary_head"}
    stored = megatron_names.leaves(model)
    # Rows of padding have the mean.
    bias = torch.cat((torch.arange(131.0), torch.full((256 - 131,), 65.0)))
    assert torch.equal(stored["lm_head.bias"], bias)
    if shape.setting("sentence_order_head"):
        for name, tensor in megatron_names_of(tensors).items():
            assert torch.equal(stored[name], tensor), name
    args = vars(state["args"])
    assert args["bias_gelu_fusion"] is (shape is MIXED)
    assert args["bert_binary_head"] is shape.setting("sentence_order_head")
    megatron_names.remove_tokamake_arguments(tmp_path / "m")
    assert open_any(tmp_path / "m").architecture == shape


def test_names_of_megatron_core_are_read(tmp_path: Path) -> None:
    tensors = random_tensors(SHAPE, 3)
    megatron_names.write(tmp_path / "m", "megatron", SHAPE, tensors)
    (file,) = tmp_path.rglob("*.pt")
    state = torch.load(file, weights_only=False)
    renamed = {}
    for name, tensor in megatron_names.leaves(state["model"]).items():
        for old, new in (
            ("language_model.", ""),
            ("lm_head.layernorm.", "lm_head.layer_norm."),
            ("lm_head.bias", "output_layer.bias"),
            ("self_attention.query_key_value.", "self_attention.linear_qkv."),
            ("self_attention.dense.", "self_attention.linear_proj."),
            ("post_attention_layernorm.", "pre_mlp_layernorm."),
            ("mlp.dense_h_to_4h.", "mlp.linear_fc1."),
            ("mlp.dense_4h_to_h.", "mlp.linear_fc2."),
        ):
            name = name.replace(old, new)
        renamed[name] = tensor
    torch.save({**state, "model": renamed}, file)
    megatron_names.remove_tokamake_arguments(tmp_path / "m")
    checkpoint = open_any(tmp_path / "m")
    assert checkpoint.architecture == SHAPE
    for name, tensor in tensors.items():
        assert torch.equal(checkpoint.source.read(f"model.{name}"), tensor), name
