"""t5 in transformers' folders and in Megatron's formats: read, written, refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support import hf_folder, megatron_names
from tests.support.random_tensors import random_tensors
from tests.support.t5s import (
    ARCHITECTURES,
    t5,
)
from tokamake.checkpoint import writer
from tokamake.checkpoint.detect import open_any
from tokamake.checkpoint.tensors.checkpoint import ParallelLayout, Target
from tokamake.errors import UserError

SHAPE = ARCHITECTURES["t5"]


def test_both_tables_of_positions_have_to_be_equal(config: Path) -> None:
    file = config.with_name("model.safetensors")
    tensors = load_file(file)
    name = "model.decoder.embed_positions.weight"
    assert torch.equal(tensors[name], tensors["model.encoder.embed_positions.weight"])
    save_file(tensors | {name: tensors[name] + 1}, file)
    with pytest.raises(UserError, match=rf"tensor {name} differs from .*a t5 has one for both"):
        hf_folder.read(config.parent)
    del tensors[name]
    save_file(tensors, file)
    with pytest.raises(UserError, match=rf"tensor {name} is missing"):
        hf_folder.read(config.parent)


def test_stored_copies_of_the_embedding_have_to_be_equal(config: Path) -> None:
    file = config.with_name("model.safetensors")
    tensors = load_file(file)
    copy = tensors["model.shared.weight"].clone()
    names = ("lm_head.weight", "model.encoder.embed_tokens.weight")
    save_file(tensors | {name: copy.clone() for name in names}, file)
    hf_folder.read(config.parent)
    for name in names:
        save_file(tensors | {name: copy + 1}, file)
        with pytest.raises(UserError, match=rf"tensor {name} differs from"):
            hf_folder.read(config.parent)


def test_what_megatron_lacks_is_refused(config: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no pipeline of a t5; choose mds, megatron or"):
        writer.write(tmp_path / "a", open_any(config.parent), "mds_pipeline", Target())
    with pytest.raises(UserError, match="stages of a model with an encoder and a decoder are not"):
        target = Target(ParallelLayout(1, 3))
        writer.write(tmp_path / "a", open_any(config.parent), "megatron", target)
    grouped = t5(num_key_value_heads=2)
    with pytest.raises(UserError, match="num_key_value_heads: 2: Megatron's encoder-decoders have"):
        megatron_names.write(tmp_path / "a", "megatron", grouped, random_tensors(grouped, 1))


NAMES = {
    "embedding.position_embeddings.weight": "model.embed_positions.weight",
    "encoder.final_layernorm.bias": "model.encoder.norm.bias",
    "decoder.final_layernorm.weight": "model.decoder.norm.weight",
    "encoder.layers.2.post_attention_layernorm.weight": (
        "model.encoder.layers.2.post_attention_layernorm.weight"
    ),
    "decoder.layers.1.post_attention_layernorm.bias": (
        "model.decoder.layers.1.cross_attn_layernorm.bias"
    ),
    "decoder.layers.1.inter_attention.query.weight": (
        "model.decoder.layers.1.cross_attn.q_proj.weight"
    ),
    "decoder.layers.0.inter_attention.dense.bias": "model.decoder.layers.0.cross_attn.o_proj.bias",
    "decoder.layers.0.post_inter_attention_layernorm.weight": (
        "model.decoder.layers.0.post_attention_layernorm.weight"
    ),
    "decoder.layers.0.mlp.dense_h_to_4h.weight": "model.decoder.layers.0.mlp.up_proj.weight",
}
"""Megatron's names below language_model, and ours."""


@pytest.mark.parametrize("shape", [SHAPE, t5(hidden_act="gelu_new")], ids=range(2))
def test_tensors_and_arguments_are_megatrons(shape: Any, tmp_path: Path) -> None:
    tensors = {name: torch.randn(tensor.shape) for name, tensor in random_tensors(shape, 3).items()}
    tensors["model.head.bias"] = torch.arange(131.0)
    megatron_names.write(tmp_path / "m", "megatron", shape, tensors)
    (file,) = tmp_path.rglob("*.pt")
    state = torch.load(file, weights_only=False)
    assert {*state["model"]} == {"language_model", "lm_head"}
    stored = megatron_names.leaves(state["model"])
    # Rows of padding have the mean.
    bias = torch.cat((torch.arange(131.0), torch.full((256 - 131,), 65.0)))
    assert torch.equal(stored["lm_head.bias"], bias)
    for theirs, ours in NAMES.items():
        assert torch.equal(stored[f"language_model.{theirs}"], tensors[ours]), theirs
    cross = "model.decoder.layers.1.cross_attn."
    for kind in ("weight", "bias"):
        # [heads, key and value, width of a head], as in Megatron.
        both = [tensors[f"{cross}{name}_proj.{kind}"].unflatten(0, (4, 16)) for name in "kv"]
        name = f"language_model.decoder.layers.1.inter_attention.key_value.{kind}"
        assert torch.equal(stored[name], torch.stack(both, 1).flatten(0, 2))
    args = vars(state["args"])
    assert (args["num_layers"], args["decoder_num_layers"]) == (3, 2)
    assert args["bias_gelu_fusion"] is (shape is not SHAPE)
    megatron_names.remove_tokamake_arguments(tmp_path / "m")
    assert open_any(tmp_path / "m").architecture == shape


@pytest.mark.parametrize(("version", "order"), [(0, (1, 0, 2)), (1, (0, 2, 1))])
def test_keys_and_values_of_early_versions_are_read(
    version: int, order: tuple[int, ...], tmp_path: Path
) -> None:
    tensors = random_tensors(SHAPE, 3)
    megatron_names.write(tmp_path / "m", "megatron", SHAPE, tensors)
    (file,) = tmp_path.rglob("*.pt")
    state = torch.load(file, weights_only=False)
    for stack in ("encoder", "decoder"):
        layers = state["model"]["language_model"][stack]
        for name, tensor in layers.items():
            if "query_key_value" in name or "key_value" in name:
                by_head = tensor.unflatten(0, (4, 3 if "query_key" in name else 2, 16))
                rest = range(3, by_head.dim())
                layers[name] = by_head.permute(*order, *rest).flatten(0, 2).contiguous()
    torch.save({**state, "checkpoint_version": version}, file)
    checkpoint = open_any(tmp_path / "m")
    for name, tensor in tensors.items():
        assert torch.equal(checkpoint.source.read(f"model.{name}"), tensor), name
