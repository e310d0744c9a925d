"""Every format that has a family's model keeps it: bits, config.json, logits of transformers."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from tests.support import berts, biencoders, dense, gpts, hf_folder, megatron_names, qwens, t5s
from tests.support.hf_folder import from_hf
from tests.support.random_tensors import random_tensors
from tokamake import plugins
from tokamake.checkpoint import writer
from tokamake.checkpoint.convert import convert
from tokamake.checkpoint.detect import open_any
from tokamake.checkpoint.megatron_model.args_reader import with_vocab_size
from tokamake.checkpoint.tensors.checkpoint import ParallelLayout, Target
from tokamake.config.architecture import Architecture
from tokamake.errors import UserError

SHAPES = {
    "bert": berts.ARCHITECTURES["bert"],
    "t5": t5s.ARCHITECTURES["t5"],
    "hf_t5": t5s.HF_ARCHITECTURES["hf_t5"],
    "qwen3": qwens.ARCHITECTURES["qwen3"],
    "qwen2": dense.ARCHITECTURES["qwen2"],
    "mistral": dense.ARCHITECTURES["mistral-tied"],
    "mistral-window": dense.ARCHITECTURES["mistral-window"],
    **{family: dense.ARCHITECTURES[family] for family in ("smollm3", "olmo2", "phi3", "gpt_neox")},
    **{family: dense.ARCHITECTURES[family] for family in ("olmo3", "gemma2", "gemma3")},
    **{family: dense.ARCHITECTURES[family] for family in ("mixtral", "qwen3_moe", "olmoe")},
    **{family: dense.spread(family) for family in dense.SPREAD},
    "biencoder": biencoders.ARCHITECTURES["biencoder"],
    "biencoder-shared": biencoders.ARCHITECTURES["biencoder-shared"],
}
WHOLE = {"torch_dist": ParallelLayout(), "universal": ParallelLayout(), "native": ParallelLayout()}
TOWERS = {kind: layout for kind, layout in WHOLE.items() if kind != "torch_dist"}
LAYOUTS = {
    "bert": {"mds": ParallelLayout(2), "megatron": ParallelLayout(2, 3), **WHOLE},
    "t5": {"mds": ParallelLayout(2), "megatron": ParallelLayout(2), **WHOLE},
    "hf_t5": {"native": ParallelLayout()},
    "qwen3": {
        "mds": ParallelLayout(2),
        "mds_pipeline": ParallelLayout(2, 3),
        "megatron": ParallelLayout(2, 3),
        **WHOLE,
    },
    "qwen2": {"mds_pipeline": ParallelLayout(3, 3), "megatron": ParallelLayout(3), **WHOLE},
    "mistral": {"mds": ParallelLayout(2), **WHOLE},
    "mistral-window": {"megatron": ParallelLayout(3), **WHOLE},
    "smollm3": {"mds": ParallelLayout(3), "megatron": ParallelLayout(3), **WHOLE},
    "phi3": {"mds_pipeline": ParallelLayout(1, 3), "megatron": ParallelLayout(3), **WHOLE},
    "olmo2": {"native": ParallelLayout()},
    **{each: {"native": ParallelLayout()} for each in ("gpt_neox", "olmo3", "gemma2", "gemma3")},
    "mixtral": {"megatron": ParallelLayout(), "torch_dist": ParallelLayout()},
    "qwen3_moe": {"megatron": ParallelLayout(1, 3), "torch_dist": ParallelLayout()},
    "olmoe": {"native": ParallelLayout()},
    **{
        family: {
            # Megatron divides no experts with biases.
            "megatron": ParallelLayout(1 + (family != "gpt_oss"), 2, expert_parallel_size=2),
            "torch_dist": ParallelLayout(),
            "native": ParallelLayout(),
        }
        for family in dense.SPREAD
    },
    "biencoder": {"mds": ParallelLayout(2), "megatron": ParallelLayout(2), **TOWERS},
    "biencoder-shared": {"mds": ParallelLayout(), "megatron": ParallelLayout(), **TOWERS},
}
CONVERTED: dict[str, dict[str, Any]] = {
    "bert": {"format": "megatron", "tensor_parallel_size": 2},
    "t5": {"format": "megatron", "tensor_parallel_size": 2},
    "hf_t5": {"format": "native"},
    "biencoder": {"format": "megatron", "tensor_parallel_size": 2},
}


def write_hf(folder: Path, family: str) -> Path:
    hf_folder.write(folder / "hf", SHAPES[family], random_tensors(SHAPES[family], 1))
    return folder / "hf"


@pytest.mark.parametrize("family", SHAPES)
def test_every_format_keeps_every_bit(family: str, tmp_path: Path) -> None:
    source = write_hf(tmp_path, family)
    for kind, layout in LAYOUTS[family].items():
        writer.write(tmp_path / kind, open_any(source), kind, Target(layout))
        checkpoint = open_any(tmp_path / kind)
        assert checkpoint.architecture == SHAPES[family], kind
        writer.write(tmp_path / kind / "back", checkpoint, "hf", Target())
        for name in ("model.safetensors", "config.json"):
            assert (tmp_path / kind / "back" / name).read_bytes() == (source / name).read_bytes()


@pytest.mark.parametrize("family", CONVERTED)
def test_a_converted_model_has_the_same_logits(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convert(source=write_hf(tmp_path, family), target=tmp_path / "there", **CONVERTED[family])
    convert(source=tmp_path / "there", target=tmp_path / "back", format="hf", compare_logits=True)
    reader = "tokamake" if SHAPES[family].has_towers else "transformers"
    assert f"logits: equal to the source, by {reader}" in capsys.readouterr().out


STORED = {
    **berts.ARCHITECTURES,
    **t5s.ARCHITECTURES,
    **t5s.HF_ARCHITECTURES,
    **qwens.ARCHITECTURES,
    **dense.ARCHITECTURES,
}


def reference_of(architecture: Architecture) -> tuple[Any, dict[str, torch.Tensor]]:
    """transformers' model, and its tensors by the names of its files."""
    if architecture.family == "t5":
        model = t5s.reference(architecture)
        model.model.decoder.embed_positions = deepcopy(model.model.encoder.embed_positions)
        return model, t5s.named_parameters(model)
    if architecture.family == "hf_t5":
        model = t5s.hf_reference(architecture)
        return model, dict(model.named_parameters())
    if architecture.family == "bert":
        model = berts.reference(architecture)
        return model, berts.tensors_of(model)
    if architecture.family == "qwen3":
        model = qwens.reference(architecture)
        return model, dict(model.named_parameters())
    model = dense.reference(architecture)
    return model, dense.as_stored(architecture, dense.tensors_of(model))


def their_outputs(architecture: Architecture, model: Any) -> list[torch.Tensor]:
    """Logits of transformers' model."""
    if architecture.has_decoder:
        samples = t5s.span_samples(architecture, number=2, length=20, decoder_length=10)
        return [t5s.their_logits(model, samples)]
    if architecture.family == "bert":
        masked = berts.masked_samples(architecture, number=2, length=20)
        return [each for each in berts.their_output(model, masked) if each is not None]
    return [model(torch.arange(40).view(2, 20)).logits]


@pytest.mark.parametrize("name", STORED)
def test_folders_of_transformers_are_read_and_written(name: str, tmp_path: Path) -> None:
    model, named = reference_of(STORED[name])
    model.save_pretrained(tmp_path / "theirs")
    architecture, tensors = hf_folder.read(tmp_path / "theirs")
    assert architecture == STORED[name]
    expected = from_hf(architecture, named)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[key], tensor) for key, tensor in expected.items())
    hf_folder.write(tmp_path / "ours", architecture, tensors)
    config = json.loads((tmp_path / "ours/config.json").read_text())
    assert config["architectures"] == [type(model).__name__]
    if architecture.family == "bert":
        assert config["layer_norm_eps"] == architecture.layer_norm_epsilon  # theirs is 1e-12
    again = type(model).from_pretrained(tmp_path / "ours").eval()
    with torch.no_grad():
        before, after = (their_outputs(architecture, each) for each in (model, again))
    assert len(before) == len(after) > 0
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


@pytest.mark.parametrize(
    ("name", "kinds", "message"),
    [
        ("mixtral", ("mds_pipeline", "universal"), "mixtral: .* writes in the format mds alone"),
        ("olmoe", ("mds", "megatron", "torch_dist", "universal"), "Megatron norms each head alone"),
        ("gpt_oss", ("mds", "universal"), "DeepSpeed has no model of family gpt_oss: DeepSpeed's"),
        ("deepseek_v3", ("mds", "mds_pipeline"), "deepseek_v3: DeepSpeed's experts have files"),
        ("olmo2", ("megatron",), "Megatron norms each head alone"),
    ],
)
def test_formats_without_such_a_model_are_refused(
    name: str, kinds: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    shape = STORED[name]
    hf_folder.write(tmp_path / "hf", shape, random_tensors(shape, 1))
    for kind in kinds:
        with pytest.raises(UserError, match=message):
            writer.write(tmp_path / kind, open_any(tmp_path / "hf"), kind, Target())


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "olmoe-scaled", "deepseek_v3"])
def test_experts_of_a_layer_in_two_tensors_are_read(name: str, tmp_path: Path) -> None:
    """transformers 5 can save experts as it has them in memory."""
    model, named = reference_of(STORED[name])
    model.save_pretrained(tmp_path, save_original_format=False)
    assert "model.layers.1.mlp.experts.gate_up_proj" in load_file(tmp_path / "model.safetensors")
    architecture, tensors = hf_folder.read(tmp_path)
    expected = from_hf(architecture, named)
    assert architecture == STORED[name]
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[key], tensor) for key, tensor in expected.items())


(
    GPT,
    (BERT, T5, HF_T5, QWEN3, QWEN2, MISTRAL, _, SMOLLM3, _, PHI3, NEOX, OLMO3, GEMMA2, GEMMA3, *_),
) = (
    gpts.LEARNED,
    SHAPES.values(),
)
MIXTRAL, QWEN3_MOE, OLMOE = (
    dense.ARCHITECTURES[name] for name in ("mixtral-tied", "qwen3_moe", "olmoe")
)
DEEPSEEK_V2, DEEPSEEK_V3 = (dense.ARCHITECTURES[name] for name in ("deepseek_v2", "deepseek_v3"))
PARTIAL = {"rope_type": "default", "partial_rotary_factor": 0.35}
KINDS = ["full_attention", "sliding_attention", "full_attention"]
NESTED = {"full_attention": {}, "sliding_attention": {"rope_type": "linear", "factor": 2.0}}
BLOOM = {"apply_residual_connection_post_layernorm": True}


@pytest.mark.parametrize(
    ("architecture", "values", "message"),
    [
        (GPT, {"scale_attn_by_inverse_layer_idx": True}, "by_inverse_layer_idx: True is not"),
        (GPT, {"scale_attn_weights": False}, "False is not supported; choose a model with T"),
        (GPT, {"add_cross_attention": True}, "add_cross_attention: True is not supported"),
        (GPT, {"activation_function": "gelu_fast"}, "hidden_act: 'gelu_fast': gpt has gelu_new"),
        (GPT, {"n_head": "absent"}, "num_attention_heads: missing"),
        (GPT, {"n_embd": "absent"}, "hidden_size: missing"),
        (gpts.MQA, {"add_cross_attention": True}, "add_cross_attention: True is not supported"),
        (gpts.ROTARY, {"sliding_window": 8}, "sliding_window: 8 is not supported; choose a model"),
        (GPT, {"head_dim": 32}, "head_dim: 32: models of type gpt2 have 16, .*; set that"),
        (gpts.ALIBI, BLOOM, "post_layernorm: True is not"),
        (gpts.ALIBI, {"quantization_config": {"bits": 4}}, "quantization_config: the folder holds"),
        (BERT, {"is_decoder": True}, "is_decoder: True is not supported; choose a model with Fal"),
        (BERT, {"add_cross_attention": True}, "add_cross_attention: True is not supported"),
        (BERT, {"position_embedding_type": "relative_key"}, "position_embedding_type: 'relative_"),
        (BERT, {"hidden_act": "silu"}, "'silu': bert has gelu or"),
        (BERT, {"tie_word_embeddings": False}, "tie_word_embeddings: False: bert has True only"),
        (BERT, {"model_type": "bert"}, "model_type: 'bert' is not supported: it norms after atte"),
        (GEMMA3, {"model_type": "gemma3"}, "it reads images; .*; the nearest type is gemma3_text"),
        (MISTRAL, {"model_type": "dbrx"}, "values; the nearest type is mixtral;"),
        (MISTRAL, {"model_type": "ministral"}, "it is a mistral: set model_type to that"),
        (MISTRAL, {"model_type": "flex_olmo"}, "after attention .* the nearest type is olmoe;"),
        (MISTRAL, {"model_type": "glm_moe_dsa"}, "indexer .* the nearest type is deepseek_v3;"),
        (MIXTRAL, {"router_jitter_noise": 0.1}, "router_jitter_noise: 0.1 is not supported"),
        (QWEN3_MOE, {"decoder_sparse_step": 2}, "decoder_sparse_step: 2 is not supported"),
        (QWEN3_MOE, {"mlp_only_layers": [0]}, r"mlp_only_layers: \[0\] is not supported"),
        (OLMOE, {"clip_qkv": 8.0}, "clip_qkv: 8.0 is not supported; choose a model with None"),
        (DEEPSEEK_V2, {"topk_method": "noaux_tc"}, "topk_method: 'noaux_tc' is not supported"),
        (DEEPSEEK_V2, {"norm_topk_prob": True}, "norm_topk_prob: True is not supported"),
        (DEEPSEEK_V3, {"scoring_func": "softmax"}, "scoring_func: 'softmax' is not supported"),
        (DEEPSEEK_V3, {"n_group": 2}, "n_group: 2: does not divide the 9 of num_experts"),
        (BERT, {"model_type": "roberta"}, "model_type: 'roberta' is not supported: it norms after"),
        (BERT, {"model_type": "xglm"}, "model_type: 'xglm' is not known; choose a model of"),
        (MISTRAL, {"model_type": "mamba"}, "it has no attention; the nearest type is llama;"),
        (QWEN3, {"model_type": "exaone4"}, "each head alone, .*; the nearest type is olmo3;"),
        (T5, {"scale_embedding": True}, "scale_embedding: True is not supported; choose a model"),
        (T5, {"decoder_ffn_dim": 64}, "decoder_ffn_dim: 64 is not supported; choose a .* with 256"),
        (T5, {"decoder_attention_heads": 2}, "decoder_attention_heads: 2 is not supported"),
        (T5, {"activation_function": "silu"}, "'silu': t5 has gelu or"),
        (T5, {"tie_word_embeddings": False}, "tie_word_embeddings: False: t5 has True only"),
        (T5, {"model_type": "bart"}, "model_type: 'bart' is not supported: it norms after attent"),
        (HF_T5, {"feed_forward_proj": "relu"}, "hidden_act: 'relu': hf_t5 has gelu_new or"),
        (HF_T5, {"feed_forward_proj": "gated-relu"}, "hidden_act: 'gated-relu': hf_t5 has gelu_n"),
        (HF_T5, {"feed_forward_proj": "absent"}, "hidden_act: 'relu': hf_t5 has gelu_new or"),
        (QWEN3, {"attention_bias": True}, "attention_bias: True is not supported; choose a model"),
        (QWEN3, {"use_sliding_window": True}, "use_sliding_window: True is not supported"),
        (
            QWEN3,
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types: 'sliding_att",
        ),
        (QWEN2, {"use_sliding_window": True}, "no published model of this type has windows"),
        (SMOLLM3, {"no_rope_layers": [0, 1, 1]}, "choose a model in which layers without"),
        (SMOLLM3, {"use_sliding_window": True}, "use_sliding_window: True is not supported"),
        (PHI3, {"layer_types": ["chunked_attention"] * 3}, "layer_types: 'chunked_attention' is"),
        (PHI3, {"rope_scaling": None, "rope_parameters": PARTIAL}, "0.35: 5 numbers of heads of w"),
        (OLMO3, {"layer_types": KINDS}, "choose a model in which layers without a window are equ"),
        (OLMO3, {"rope_parameters": NESTED}, "linear.* is not supported in layers with a window"),
        (GEMMA2, {"use_bidirectional_attention": True}, "bidirectional_attention: True is not"),
        (GEMMA2, {"hidden_activation": "silu"}, "hidden_act: 'silu': gemma2 has gelu_pytorch_tanh"),
        (NEOX, {"hidden_act": "silu"}, "hidden_act: 'silu': gpt_neox has gelu or"),
        (QWEN3, {"hidden_act": "gelu"}, "hidden_act: 'gelu': qwen3 has silu only"),
        (QWEN3, {"head_dim": 7}, "head_dim 7 is odd; rotary needs pairs"),
    ],
    ids=lambda value: value.family if isinstance(value, Architecture) else "",
)
def test_configs_beyond_the_family_are_refused(
    architecture: Architecture, values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    hf_folder.write(tmp_path / "a", architecture, random_tensors(architecture, 1))
    path = tmp_path / "a/config.json"
    config = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in config.items() if value != "absent"}))
    with pytest.raises(UserError, match=message) as error:
        hf_folder.read(tmp_path / "a")
    assert all(line.startswith(f"{path}: ") for line in str(error.value).splitlines())


def test_refused_types_are_those_of_transformers_with_one_reason_each() -> None:
    families = [plugins.load("models/*/hf", family) for family in plugins.names("models/*/hf")]
    refused = [name for each in families for name in getattr(each, "REFUSED", {})]
    known = {each.model_type for family in families for each in family.HUGGING_FACE}
    assert len({*refused} | known) == len(refused) + len(known)
    assert {*refused} <= CONFIG_MAPPING_NAMES.keys()


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        (gpts.gpt(head_dim=32), "head_dim: 32: .*; gpt2, the nearest, has 16: set that"),
        (gpts.gpt(num_key_value_heads=2), "num_key_value_heads: 2: .*; gpt2, .* has 4: set"),
        (gpts.gpt(attention_bias=False), "attention_bias: False: .* has True: set that"),
        (gpts.gpt(embedding_layernorm=True), "embedding_layernorm: True: .*; gpt2, the nearest"),
        (gpts.gpt(position_embedding="alibi"), "layernorm: False: .*; bloom, .* True: set"),
        (
            gpts.gpt(position_embedding="rotary", mlp_bias=False),
            "attention_bias: True: .*; starcoder2, the nearest, has False",
        ),
        (berts.MIXED, "hidden_act: 'gelu_new': .* megatron-bert, the nearest, has 'gelu': set"),
        (berts.bert(type_vocab_size=0), "type_vocab_size: 0: .* has 2"),
        (berts.bert(num_key_value_heads=2), "num_key_value_heads: 2: .* has 4"),
        (berts.bert(mlp_bias=False), "mlp_bias: False"),
        (t5s.t5(layer_norm_epsilon=1e-6), "layer_norm_epsilon: 1e-06: .* blenderbot, .* has 1e-05"),
        (t5s.t5(num_key_value_heads=2), "num_key_value_heads: 2: .* has 4"),
        (t5s.t5(mlp_bias=False), "mlp_bias: False"),
    ],
    ids=lambda value: value.family if isinstance(value, Architecture) else "",
)
def test_models_without_a_model_type_are_refused(
    architecture: Architecture, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message) as error:
        hf_folder.write(tmp_path / "a", architecture, random_tensors(architecture, 1))
    assert str(error.value).startswith("model.architecture: ")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("family", "layouts"),
    [("bert", [(2, 1), (4, 3), (1, 1)]), ("t5", [(2, 1), (4, 1), (1, 1)])],
    ids=["bert", "t5"],
)
def test_a_layout_becomes_another_layout(
    family: str, layouts: list[tuple[int, int]], tmp_path: Path
) -> None:
    first = source = write_hf(tmp_path, family)
    for size, stages in layouts:
        target = tmp_path / f"{size}-{stages}"
        writer.write(target, open_any(source), "megatron", Target(ParallelLayout(size, stages)))
        source = target
    writer.write(tmp_path / "back", open_any(source), "hf", Target())
    weights = [folder / "model.safetensors" for folder in (tmp_path / "back", first)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.parametrize(
    ("family", "bias"), [("bert", "masked_token_head.bias"), ("t5", "head.bias")]
)
def test_padding_of_the_vocabulary_is_removed_from_the_bias_too(
    family: str, bias: str, tmp_path: Path
) -> None:
    tensors = random_tensors(SHAPES[family], 3)
    megatron_names.write(tmp_path / "m", "megatron", SHAPES[family], tensors)
    megatron_names.remove_tokamake_arguments(tmp_path / "m", vocab_size=None)
    checkpoint = open_any(tmp_path / "m")
    assert checkpoint.architecture.vocab_size == 256
    cut = with_vocab_size(checkpoint, 131)
    for name in ("embed_tokens.weight", bias):
        assert torch.equal(cut.source.read(f"model.model.{name}"), tensors[f"model.{name}"])
