"""Megatron's arguments that change what a model computes.

They become part of the architecture, or are refused. Written arguments describe the same model, or
`convert` warns that they cannot.
"""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import dense, gpts, hf_folder, llamas, megatron_names
from tests.support.random_tensors import random_tensors
from tokamake.checkpoint.convert import convert
from tokamake.checkpoint.detect import open_any
from tokamake.checkpoint.megatron_model.args_reader import architecture_of
from tokamake.checkpoint.torch_files.allowed_globals import StandIn, attribute_of
from tokamake.config.architecture import Architecture
from tokamake.errors import UserError

SHAPE: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
GPT = SHAPE | {"normalization": "LayerNorm", "position_embedding_type": "learned_absolute"}
LLAMA = SHAPE | {
    "swiglu": True,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "add_bias_linear": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
FILE = Path("somewhere/model_optim_rng.pt")


def read(common: dict[str, Any], *, is_core: bool = True, **changes: Any) -> Architecture:
    args = Namespace(**{**common, **changes})
    return architecture_of(args, FILE, padded_vocab_size=256, is_core=is_core)


class PositionEmbeddingType(StandIn):
    """BigScience's enum, as the reader returns it from a checkpoint."""

    name = "megatron.enums.PositionEmbeddingType"


def by_name(member: str) -> Any:
    """Return a member of the enum, as Python 3.11.0 to 3.11.4 pickles it."""
    return attribute_of(PositionEmbeddingType, member)


CARRIED = [
    (LLAMA, {}, {"rope_scaling": None, "rope_theta": 10000.0, "rms_norm_eps": 1e-5}),
    (LLAMA, {"rotary_base": 500000}, {"rope_theta": 500000.0}),
    (LLAMA, {"rotary_base": 7, "rope_theta": 7.0}, {"rope_theta": 7.0}),
    (LLAMA, {"norm_epsilon": 1e-3}, {"rms_norm_eps": 1e-3}),
    (LLAMA, {"add_bias_linear": True}, {"attention_bias": True, "mlp_bias": True}),
    (LLAMA, {"add_bias_linear": True, "add_qkv_bias": True}, {"attention_bias": True}),
    (LLAMA, {"use_rope_scaling": True, "rope_scaling_factor": 32.0}, {"factor": 32.0}),
    (LLAMA, {"use_rope_scaling": True}, LLAMA3),
    (LLAMA, {"rotary_seq_len_interpolation_factor": 4}, {"rope_type": "linear", "factor": 4.0}),
    (LLAMA, {"rotary_seq_len_interpolation_factor": 1}, {"rope_scaling": None}),
    (LLAMA, {"rope_scaling_factor": 8.0}, {"rope_scaling": None}),
    (GPT, {}, {"hidden_act": "gelu_new", "position_embedding": "learned", "mlp_bias": True}),
    (GPT, {"layernorm_epsilon": 1e-3}, {"layer_norm_epsilon": 1e-3}),
    (GPT, {"bias_gelu_fusion": False}, {"hidden_act": "gelu"}),
    (GPT, {"bias_gelu_fusion": True, "onnx_safe": True}, {"hidden_act": "gelu_new"}),
    (GPT, {"bias_gelu_fusion": True, "add_bias_linear": False}, {"hidden_act": "gelu"}),
    (GPT, {"bias_gelu_fusion": False, "openai_gelu": True}, {"hidden_act": "gelu"}),
    (GPT, {"position_embedding_type": "rope", "rotary_base": 5}, {"rope_theta": 5.0}),
    (GPT, {"use_rotary_position_embeddings": True}, {"position_embedding": "rotary"}),
    (GPT, {"rotary_percent": 0.25, "rotary_interleaved": True}, {"position_embedding": "learned"}),
    (GPT, {"position_embedding_type": "alibi"}, {"position_embedding": "alibi"}),
    (GPT, {"position_embedding_type": PositionEmbeddingType(1)}, {"position_embedding": "rotary"}),
    (GPT, {"position_embedding_type": PositionEmbeddingType(2)}, {"position_embedding": "learned"}),
    (GPT, {"position_embedding_type": PositionEmbeddingType(3)}, {"position_embedding": "alibi"}),
    (GPT, {"position_embedding_type": by_name("absolute")}, {"position_embedding": "learned"}),
    (GPT, {"position_embedding_type": by_name("alibi")}, {"position_embedding": "alibi"}),
    (GPT, {"embed_layernorm": True}, {"embedding_layernorm": True}),
    (GPT, {"num_experts": [1], "softmax_type": "vanilla", "scaling_recipe": "none"}, {}),
    (GPT, {"apply_query_key_layer_scaling": True, "fp8": "e4m3", "window_size": None}, {}),
    (GPT, {"attention_head_type": "multiquery"}, {"num_key_value_heads": 1}),
    (GPT, {"group_query_attention": True, "num_query_groups": 2}, {"num_key_value_heads": 2}),
    (GPT, {"num_query_groups": 1}, {"num_key_value_heads": 4}),
    (LLAMA, {"kv_channels": 32}, {"head_dim": 32}),
    (
        LLAMA,
        {"qk_layernorm": True, "norm_epsilon": 1e-3},
        {"family": "qwen3", "rms_norm_eps": 1e-3},
    ),
    (LLAMA, {"add_bias_linear": False, "add_qkv_bias": True}, {"family": "qwen2"}),
    (LLAMA, {"add_qkv_bias": True}, {"family": "qwen2", "rope_theta": 10000.0}),
    (LLAMA, {"rotary_percent": 0.5}, {"family": "phi3", "partial_rotary_factor": 0.5}),
    (LLAMA, {"no_rope_freq": 2}, {"family": "smollm3", "no_rope_layer_interval": 2}),
    (LLAMA, {"no_rope_freq": [0, 1, 0, 1]}, {"family": "smollm3", "no_rope_layer_interval": 2}),
    (LLAMA, {"window_size": [15, 0]}, {"family": "mistral", "sliding_window": 16}),
    (
        LLAMA,
        {"rotary_percent": 0.5, "window_size": (15, 0)},
        {"family": "phi3", "sliding_window": 16},
    ),
]


@pytest.mark.parametrize(("common", "changes", "expected"), CARRIED)
def test_arguments_become_settings_of_the_architecture(
    common: dict[str, Any], changes: dict[str, Any], expected: dict[str, Any]
) -> None:
    settings = read(common, **changes).model_dump()
    settings |= settings["rope_scaling"] or {}
    assert expected.items() <= settings.items()


def test_megatron_core_takes_norm_epsilon_and_classic_models_layernorm_epsilon() -> None:
    both = {"layernorm_epsilon": 1e-5, "norm_epsilon": 1e-6}
    assert read(LLAMA, **both, is_core=True).rms_norm_eps == 1e-6
    assert read(LLAMA, **both, is_core=False).rms_norm_eps == 1e-5


def test_openai_gelu_counts_in_classic_models() -> None:
    common = {**GPT, "bias_gelu_fusion": False}
    assert read(common, openai_gelu=True, is_core=False).hidden_act == "gelu_new"
    assert read(common, onnx_safe=True, is_core=False).hidden_act == "gelu"
    assert read(common, is_core=False).hidden_act == "gelu"


REFUSED = [
    *((GPT, {name: True}) for name in ("apply_layernorm_1p", "squared_relu", "quick_geglu")),
    *((GPT, {name: True}) for name in ("qk_layernorm", "multi_latent_attention", "use_mup")),
    (GPT, {"apply_residual_connection_post_layernorm": True}),
    (GPT, {"layernorm_zero_centered_gamma": True}),
    (GPT, {"glu_activation": "geglu"}),
    (GPT, {"window_size": (128, 0)}),
    (GPT, {"num_experts": 8}),
    (GPT, {"num_experts": [1, 4]}),
    (GPT, {"softmax_type": "off-by-one"}),
    (GPT, {"softmax_scale": 0.1}),
    (GPT, {"parallel_attn": True}),
    (GPT, {"mtp_num_layers": 1}),
    (GPT, {"attention_output_gate": True}),
    (GPT, {"glu_linear_offset": 1.0}),
    (GPT, {"hybrid_override_pattern": "M-M*"}),
    (GPT, {"add_position_embedding": False}),
    (GPT, {"add_bias_linear": False, "add_qkv_bias": True}),
    (LLAMA, {"add_qkv_bias": True, "qk_layernorm": True}),
    (LLAMA, {"rotary_percent": 0.5, "no_rope_freq": 2}),
    (LLAMA, {"window_size": (15, 15)}),
    (LLAMA, {"window_size": (15, 0), "window_attn_skip_freq": 2}),
    (LLAMA, {"window_size": (15, 0), "window_attn_skip_freq": [1, 0, 0]}),
    ({**GPT, "position_embedding_type": "rope"}, {"rotary_percent": 0.5}),
    (LLAMA, {"rotary_interleaved": True}),
    (LLAMA, {"no_rope_freq": [1, 0, 0, 1]}),
    (LLAMA, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
    (LLAMA, {"position_embedding_type": "none"}),
    (LLAMA, {"position_embedding_type": "mrope"}),
    (GPT, {"position_embedding_type": "relative"}),
    (GPT, {"position_embedding_type": PositionEmbeddingType(9)}),
    (GPT, {"position_embedding_type": by_name("sinusoidal")}),
    (LLAMA, {"normalization": "LayerNorm"}),
    (LLAMA, {"qk_layernorm": True, "normalization": "LayerNorm"}),
    (GPT, {"normalization": "RMSNorm"}),
    (GPT, {"vocab_size": "many"}),
    (GPT, {"num_key_value_heads": "few"}),
]


@pytest.mark.parametrize(("common", "changes"), REFUSED)
def test_an_argument_that_no_family_supports_is_refused_by_name(
    common: dict[str, Any], changes: dict[str, Any]
) -> None:
    with pytest.raises(UserError) as error:
        read(common, **changes)
    name = [*changes][-1]
    assert str(error.value).startswith(f"{FILE}: args.{name}: ")
    assert "give " in str(error.value) or "again" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("common", "changes", "message"),
    [
        (LLAMA, {"rope_theta": 1e4, "rotary_base": 5e5}, "contradict each other"),
        (LLAMA, {"rope_theta": 1e4, "rotary_base": [1e4]}, "contradict each other"),
        (
            LLAMA,
            {"use_rope_scaling": True, "rotary_seq_len_interpolation_factor": 2},
            "combines it with use_rope_scaling",
        ),
        (GPT, {"onnx_safe": True}, "Megatron versions use different GELUs"),
        (LLAMA, {"position_embedding_type": "learned_absolute"}, "llama has rotary only"),
        (LLAMA, {"qk_layernorm": True, "add_bias_linear": True}, "qwen3 does not know it"),
    ],
)
def test_contradicting_arguments_are_refused(
    common: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        read(common, **changes, is_core=False)


SCALINGS = {
    "llama3": (LLAMA3, {"use_rope_scaling": True, "rope_scaling_factor": 8.0}),
    "linear": (
        {"rope_type": "linear", "factor": 2.0},
        {"use_rope_scaling": False, "rotary_seq_len_interpolation_factor": 2.0},
    ),
}


def test_windows_are_written_for_megatron_lm(tmp_path: Path) -> None:
    """Megatron counts the tokens before the token itself; a Mistral without a window is a Llama."""
    shape = dense.ARCHITECTURES["mistral-window"]
    windowed = converted(tmp_path / "windowed", shape, "megatron")
    (file,) = windowed.rglob("*.pt")
    assert torch.load(file, weights_only=False)["args"].window_size == (6, 0)
    plain = converted(tmp_path / "plain", dense.ARCHITECTURES["mistral"], "megatron")
    for folder in (windowed, plain):
        megatron_names.remove_tokamake_arguments(folder)
    assert open_any(windowed).architecture == shape
    assert open_any(plain).architecture.family == "llama"


UNSUPPORTED_SCALINGS = {
    "llama3.2": {**LLAMA3, "original_max_position_embeddings": 4096},
    "yarn": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32},
}
GQA = llamas.ARCHITECTURES[5]


def with_scaling(scaling: dict[str, Any]) -> Architecture:
    return Architecture(**{**GQA.model_dump(), "rope_scaling": scaling})


def converted(tmp_path: Path, shape: Architecture, kind: str) -> Path:
    """Write a checkpoint and convert it to a format of Megatron."""
    hf_folder.write(tmp_path / "hf", shape, random_tensors(shape, 1))
    convert(source=tmp_path / "hf", target=tmp_path / kind, format=kind)  # type: ignore
    return tmp_path / kind


@pytest.mark.parametrize("name", SCALINGS)
def test_rope_scaling_is_written_for_megatron_lm(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scaling, expected = SCALINGS[name]
    folder = converted(tmp_path, with_scaling(scaling), "megatron")
    (file,) = folder.rglob("*.pt")
    args = vars(torch.load(file, weights_only=False)["args"])
    assert expected.items() <= args.items()
    assert type(args["rotary_base"]) is int  # like Megatron-LM's option
    assert "has no argument" not in capsys.readouterr().err
    megatron_names.remove_tokamake_arguments(folder)
    assert open_any(folder).architecture == with_scaling(scaling)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(
            (name, kind)
            for name in UNSUPPORTED_SCALINGS
            for kind in ("mds", "megatron", "universal")
        ),
        ("llama3", "mds"),
        ("linear", "mds-pipeline"),
    ],
)
def test_rope_scaling_that_megatron_does_not_support_is_kept_with_a_warning(
    name: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scaling = UNSUPPORTED_SCALINGS.get(name) or SCALINGS[name][0]
    folder = converted(tmp_path, with_scaling(scaling), kind)
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert f"has no argument for rope_scaling {scaling['rope_type']}: it would compute" in line
    assert open_any(folder).architecture == with_scaling(scaling)


@pytest.mark.parametrize("kind", ["mds", "megatron"])
@pytest.mark.parametrize("name", gpts.ARCHITECTURES)
def test_a_warning_is_printed_for_gpts_that_megatron_has_no_arguments_for(
    name: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = gpts.ARCHITECTURES[name]
    folder = converted(tmp_path, shape, kind)
    printed = capsys.readouterr().err
    assert open_any(folder).architecture == shape
    megatron_names.remove_tokamake_arguments(folder)
    architecture = open_any(folder).architecture
    activation = {"hidden_act": "gelu_new"} if "tanh" in shape.hidden_act else {}
    if "has no argument" not in printed:
        assert architecture == shape.model_copy(update=activation)
    unsupported = {"gpt2-relu", "starcoder2-mqa-plain"}
    unsupported |= {"bloom", "bloom-6-heads"} if kind == "megatron" else set()
    assert ("has no argument" in printed) == (name in unsupported)


@pytest.mark.parametrize("kind", ["mds", "mds-pipeline", "megatron", "universal"])
def test_every_format_refuses_an_unsupported_argument(kind: str, tmp_path: Path) -> None:
    folder = converted(tmp_path, GQA, kind)
    megatron_names.remove_tokamake_arguments(folder, rotary_interleaved=True)
    with pytest.raises(UserError, match=r"\.pt: args\.rotary_interleaved: True: means") as error:
        open_any(folder)
    assert str(error.value).startswith(str(folder))
