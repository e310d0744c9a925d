"""t5 in transformers' folders and in Megatron's formats: read, written, refused."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support import hf_folder, megatron_names
from tests.support.hf_tensors import from_hf
from tests.support.random_tensors import random_tensors
from tests.support.t5s import (
    ARCHITECTURES,
    named_parameters,
    reference,
    span_samples,
    t5,
    their_logits,
)
from tokamake.checkpoint import writer
from tokamake.checkpoint.detect import open_any
from tokamake.checkpoint.hf import config_json
from tokamake.checkpoint.megatron_model.vocabulary import with_vocab_size
from tokamake.checkpoint.tensors.checkpoint import ParallelLayout, Target
from tokamake.errors import UserError

SHAPE = ARCHITECTURES["t5"]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_folders_of_transformers_are_read_and_written(name: str, tmp_path: Path) -> None:
    model = reference(ARCHITECTURES[name])
    model.model.decoder.embed_positions = deepcopy(model.model.encoder.embed_positions)
    model.save_pretrained(tmp_path / "theirs")
    architecture, tensors = hf_folder.read(tmp_path / "theirs")
    assert architecture == ARCHITECTURES[name]
    expected = from_hf(architecture, named_parameters(model))
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[key], tensor) for key, tensor in expected.items())
    hf_folder.write(tmp_path / "ours", architecture, tensors)
    config = json.loads((tmp_path / "ours/config.json").read_text())
    assert config["architectures"] == [type(model).__name__]
    again = type(model).from_pretrained(tmp_path / "ours").eval()
    samples = span_samples(architecture, number=2, length=20, decoder_length=10)
    with torch.no_grad():
        assert torch.equal(their_logits(again, samples), their_logits(model, samples))


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """config.json of a folder."""
    hf_folder.write(tmp_path / "hf", SHAPE, random_tensors(SHAPE, 1))
    return tmp_path / "hf/config.json"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"scale_embedding": True}, "scale_embedding: True is not supported; choose a model with"),
        ({"decoder_ffn_dim": 64}, "decoder_ffn_dim: 64 is not supported; choose a model with 256"),
        ({"decoder_attention_heads": 2}, "decoder_attention_heads: 2 is not supported"),
        ({"activation_function": "silu"}, "'silu': t5 has gelu or"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings: False: t5 has True only"),
        ({"model_type": "bart"}, "model_type: 'bart' is not supported: it norms after attention"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_configs_beyond_the_family_are_refused(
    values: dict[str, Any], message: str, config: Path
) -> None:
    config.write_text(json.dumps(json.loads(config.read_text()) | values))
    with pytest.raises(UserError, match=message):
        hf_folder.read(config.parent)


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


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (t5(layer_norm_epsilon=1e-6), "layer_norm_epsilon: 1e-06: .* blenderbot, .* has 1e-05"),
        (t5(num_key_value_heads=2), "num_key_value_heads: 2: .* has 4"),
        (t5(mlp_bias=False), "mlp_bias: False"),
    ],
)
def test_what_transformers_lacks_is_refused(shape: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        config_json.format_for(shape)


def test_a_layout_becomes_another_layout(config: Path, tmp_path: Path) -> None:
    source = config.parent
    for size in (2, 4, 1):
        writer.write(
            tmp_path / str(size), open_any(source), "megatron", Target(ParallelLayout(size))
        )
        source = tmp_path / str(size)
    writer.write(tmp_path / "back", open_any(source), "hf", Target())
    weights = [file / "model.safetensors" for file in (tmp_path / "back", config.parent)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_what_megatron_lacks_is_refused(config: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no pipeline of a t5; choose mds, megatron or"):
        writer.write(tmp_path / "a", open_any(config.parent), "mds_pipeline", Target())
    with pytest.raises(UserError, match="stages of a model with an encoder and a decoder are not"):
        target = Target(ParallelLayout(1, 3))
        writer.write(tmp_path / "a", open_any(config.parent), "megatron", target)
    grouped = t5(num_key_value_heads=2)
    with pytest.raises(UserError, match="num_key_value_heads: 2: Megatron's encoder-decoders have"):
        megatron_names.write(tmp_path / "a", "megatron", grouped, random_tensors(grouped, 1))


def leaves(tree: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return {prefix.removesuffix("."): tree}
    return {
        name: leaf
        for key, value in tree.items()
        for name, leaf in leaves(value, f"{prefix}{key}.").items()
    }


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
    stored = leaves(state["model"])
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


def test_padding_of_the_vocabulary_is_removed_from_the_bias_too(tmp_path: Path) -> None:
    tensors = random_tensors(SHAPE, 3)
    megatron_names.write(tmp_path / "m", "megatron", SHAPE, tensors)
    megatron_names.remove_tokamake_arguments(tmp_path / "m", vocab_size=None)
    checkpoint = open_any(tmp_path / "m")
    assert checkpoint.architecture.vocab_size == 256
    cut = with_vocab_size(checkpoint, 131)
    for name in ("embed_tokens.weight", "head.bias"):
        assert torch.equal(cut.source.read(f"model.model.{name}"), tensors[f"model.{name}"])
