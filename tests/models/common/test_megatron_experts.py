"""Mixtures of experts in Megatron-LM's formats: arguments, and files of expert-parallel ranks.

`tests/checkpoint/megatron/test_format.py` and `tests/checkpoint/torch_dist/test_format.py` compare
with megatron.core.
"""

import math
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import dense, megatron_names
from tests.support.random_tensors import random_tensors
from tokamake.checkpoint import writer
from tokamake.checkpoint.detect import open_any
from tokamake.checkpoint.megatron_model import module_tree
from tokamake.checkpoint.megatron_model.args_reader import architecture_of
from tokamake.checkpoint.megatron_model.model_arguments import inexpressible
from tokamake.checkpoint.megatron_model.optimizer_buffers import buffer_places
from tokamake.checkpoint.megatron_model.tensor_parallel_slices import TensorParallelRank
from tokamake.checkpoint.tensors.checkpoint import ParallelLayout, Target
from tokamake.checkpoint.tensors.dtypes import FLOAT32
from tokamake.checkpoint.torch_dist import optimizer_reader
from tokamake.checkpoint.torch_dist.optimizer_reader import StoredModel
from tokamake.checkpoint.torch_files.dcp_metadata import StoredChunk, WholeTensor
from tokamake.config.architecture import Architecture
from tokamake.errors import UserError
from tokamake.parallel.axis import Axis

ARGUMENTS: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "swiglu": True,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "add_bias_linear": False,
    "num_experts": 8,
    # Values of Megatron-LM's options that change nothing.
    "moe_layer_freq": 1,
    "moe_router_score_function": "softmax",
    "moe_router_load_balancing_type": "aux_loss",
    "moe_router_enable_expert_bias": False,
    "moe_shared_expert_intermediate_size": None,
}
QWEN = {"qk_layernorm": True}
SIGMOID: dict[str, Any] = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_shared_expert_intermediate_size": 48,
    "moe_layer_freq": [0, 1],
}
GROUPS = {"moe_router_topk": 4, "moe_router_num_groups": 4, "moe_router_group_topk": 2}
OSS: dict[str, Any] = {
    "swiglu": False,
    "quick_geglu": True,
    "softmax_type": "learnable",
    "add_bias_linear": True,
    "glu_linear_offset": 1.0,
    "activation_func_clamp_value": 7.0,
    "window_size": (15, 0),
    "window_attn_skip_freq": 2,
}
FILE = Path("somewhere/model_optim_rng.pt")


def read(**changes: Any) -> Architecture:
    return architecture_of(
        Namespace(**{**ARGUMENTS, **changes}), FILE, padded_vocab_size=256, is_core=True
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"family": "mixtral", "num_experts": 8, "num_experts_per_tok": 2}),
        ({"moe_router_topk": 3}, {"num_experts_per_tok": 3, "norm_topk_prob": True}),
        ({"moe_ffn_hidden_size": 20}, {"family": "mixtral", "intermediate_size": 20}),
        ({"window_size": (15, 0)}, {"family": "mixtral", "sliding_window": 16}),
        ({"moe_layer_freq": [1, 1]}, {"family": "mixtral"}),
        ({"moe_expert_capacity_factor": -1.0}, {"family": "mixtral"}),
        (QWEN, {"family": "qwen3_moe", "moe_intermediate_size": 48, "norm_topk_prob": True}),
        (QWEN | {"moe_ffn_hidden_size": 20}, {"intermediate_size": 48, "norm_topk_prob": True}),
        (QWEN | {"moe_router_pre_softmax": True}, {"norm_topk_prob": False}),
        (SIGMOID, {"family": "glm4_moe", "first_k_dense_replace": 1, "n_shared_experts": 1}),
        (SIGMOID | {"moe_router_topk": 1}, {"norm_topk_prob": False, "n_group": 1}),
        (SIGMOID | QWEN | GROUPS, {"use_qk_norm": True, "n_group": 4, "topk_group": 2}),
        (
            SIGMOID | {"rotary_percent": 0.5, "mtp_num_layers": 1, "add_qkv_bias": True},
            {
                "partial_rotary_factor": 0.5,
                "num_nextn_predict_layers": 1,
                "qkv_bias": True,
                "use_qk_norm": False,
            },
        ),
        (
            OSS,
            {
                "family": "gpt_oss",
                "swiglu_limit": 7.0,
                "sliding_window": 16,
                "full_attention_interval": 2,
                "attention_bias": True,
                "rope_scaling": None,
            },
        ),
    ],
)
def test_arguments_become_settings_of_the_architecture(
    changes: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert expected.items() <= read(**changes).model_dump().items()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("moe_layer_freq", 2),
        ("moe_layer_freq", [0, 1]),
        ("moe_shared_expert_intermediate_size", 64),
        ("moe_router_score_function", "sigmoid"),
        ("moe_router_group_topk", 2),
        ("moe_router_enable_expert_bias", True),
        ("moe_router_topk_scaling_factor", 2.5),
        ("moe_router_load_balancing_type", "sinkhorn"),
        ("moe_router_load_balancing_type", ["sinkhorn"]),
        ("moe_expert_capacity_factor", 1.25),
        ("moe_apply_probs_on_input", True),
        ("moe_latent_size", 16),
        ("moe_input_jitter_eps", 0.01),
        ("moe_router_pre_softmax", True),
        ("multi_latent_attention", True),
        ("mtp_num_layers", 1),
    ],
)
def test_arguments_of_another_model_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(UserError, match=re.escape(f"{FILE}: args.{name}: {value!r}: means ")):
        read(**{name: value})


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        (SIGMOID | GROUPS | {"moe_router_topk": 8}, "moe_router_group_topk"),
        (SIGMOID | {"moe_shared_expert_intermediate_size": 50}, "moe_shared_expert_intermediat"),
        (SIGMOID | {"moe_layer_freq": [1, 0]}, "moe_layer_freq"),
        (SIGMOID | {"moe_layer_freq": [0, 2]}, "moe_layer_freq"),
        (SIGMOID | {"moe_layer_freq": 2}, "moe_layer_freq"),
        (SIGMOID | {"moe_shared_expert_gate": True}, "moe_shared_expert_gate"),
        (SIGMOID | {"moe_latent_size": 16}, "moe_latent_size"),
        (OSS | {"glu_linear_offset": 0.0}, "glu_linear_offset"),
        (OSS | {"activation_func_clamp_value": None}, "activation_func_clamp_value"),
        (OSS | {"moe_router_score_function": "sigmoid"}, "moe_router_score_function"),
    ],
)
def test_arguments_beyond_a_family_are_refused_by_name(changes: dict[str, Any], name: str) -> None:
    with pytest.raises(UserError, match=rf"args\.{name}\w*: .*: means "):
        read(**changes)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"moe_layer_freq": 2}, "2: means experts in one of 2 layers alone, which family mixtral"),
        ({"moe_layer_freq": [0, 1]}, "[0, 1]: means layers without experts, which family mixtral"),
        (
            {"moe_layer_freq": (0, 0)},
            "(0, 0): no layer has experts, but args.num_experts is 8; correct the one",
        ),
        (
            SIGMOID | {"moe_layer_freq": [0, 1, 1]},
            "[0, 1, 1]: 3 numbers, but args.num_layers is 2; correct the one that is wrong",
        ),
        (
            {"moe_shared_expert_intermediate_size": 48},
            "48: means an MLP that all tokens share, which family mixtral does not have; give",
        ),
        (
            SIGMOID | {"moe_shared_expert_intermediate_size": 50},
            "50: means an MLP that all tokens share, whose width is no multiple of an expert's 48",
        ),
        (
            {"swiglu": False, "normalization": "LayerNorm", "num_experts": 0, "add_qkv_bias": True},
            "keys and values alone, which no family of tokamake combines with the other arguments",
        ),
        (
            OSS | {"glu_linear_offset": None},
            "None: means up projections plus 0 instead of plus 1, which family gpt_oss does not",
        ),
        (
            {"swiglu": False, "normalization": "LayerNorm"},
            "8: means experts, which family gpt does not have; give a checkpoint of a model",
        ),
    ],
)
def test_the_error_is_true_of_the_family(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=re.escape(text)):
        read(**changes)


@pytest.mark.parametrize(
    ("name", "changes", "settings"),
    [
        ("deepseek_v2", {}, ["topk_group 2 with num_experts_per_tok 5"]),
        ("deepseek_v3", {"rms_norm_eps": 1e-5}, ["rms_norm_eps 1e-05 beside norms of latent"]),
        ("deepseek_v3", {"norm_topk_prob": False}, ["norm_topk_prob False with sigmoids"]),
        ("deepseek_v3", {"topk_group": 3}, ["topk_group 3 with num_experts_per_tok 5"]),
        ("deepseek_v3", {"rope_interleave": False}, ["rope_interleave False"]),
        ("deepseek_v3", {"rope_scaling": dense.YARN}, []),
        ("deepseek_v3", {"rope_scaling": dense.YARN | {"truncate": False}}, ["rope_scaling yarn"]),
        (
            "deepseek_v3",
            {"rope_scaling": {**dense.YARN, "mscale_all_dim": 1}},
            ["rope_scaling yarn"],
        ),
        ("deepseek_v3", {"attention_bias": True}, ["attention_bias True with mlp_bias False"]),
        ("gpt_oss", {"swiglu_alpha": 1.5}, ["swiglu_alpha 1.5"]),
        ("gpt_oss", {"rope_scaling": dense.YARN}, ["rope_scaling yarn"]),
    ],
)
def test_settings_without_an_argument_are_named(
    name: str, changes: dict[str, Any], settings: list[str]
) -> None:
    usual = {"rms_norm_eps": 1e-6} if name.startswith("deepseek") else {}
    shape = Architecture(**{**dense.ARCHITECTURES[name].model_dump(), **usual, **changes})
    found = inexpressible(shape, is_megatron_lm=True)
    assert [each[: len(text)] for each, text in zip(found, settings, strict=True)] == settings


def test_weights_of_a_single_expert_that_are_1_have_no_argument() -> None:
    shape = dense.ARCHITECTURES["mixtral-tied"]
    assert inexpressible(shape, is_megatron_lm=True) == ["norm_topk_prob of a single expert"]
    assert not inexpressible(dense.ARCHITECTURES["mixtral"], is_megatron_lm=True)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe-raw", *dense.SPREAD])
@pytest.mark.parametrize("kind", ["megatron", "torch_dist"])
def test_written_arguments_describe_the_model(name: str, kind: str, tmp_path: Path) -> None:
    shape = dense.spread(name) if name in dense.SPREAD else dense.ARCHITECTURES[name]
    assert not inexpressible(shape, is_megatron_lm=True)
    megatron_names.write(tmp_path / "a", kind, shape, random_tensors(shape, 1))
    megatron_names.remove_tokamake_arguments(tmp_path / "a")
    assert open_any(tmp_path / "a").architecture == shape


def divided(folder: Path, size: int, *, is_grouped: bool, **arguments: Any) -> None:
    """Divide the experts of classic files among ranks, as Megatron's own ranks have them."""
    for file in folder.glob("iter_*/mp_rank_*/model_optim_rng.pt"):
        state = torch.load(file, weights_only=False)
        vars(state["args"]).update({"expert_model_parallel_size": size, **arguments})
        model, number = state["model"], state["args"].num_experts // size
        for rank in range(size):
            own: dict[str, Any] = {}
            for name, tensor in model.items():
                match = re.fullmatch(r"(.*\.experts\.)local_experts\.(\d+)\.(.*\.weight)", name)
                if match is None:
                    own[name] = tensor
                elif int(match[2]) // number == rank:
                    place = int(match[2]) % number
                    sequential = f"{match[1]}local_experts.{place}.{match[3]}"
                    own[f"{match[1]}{match[3]}{place}" if is_grouped else sequential] = tensor
            folder_of_rank = file.parent.with_name(f"{file.parent.name}_{rank:03d}")
            folder_of_rank.mkdir()
            torch.save({**state, "model": own}, folder_of_rank / file.name)
        file.unlink()
        file.parent.rmdir()


@pytest.mark.parametrize("is_grouped", [False, True])
@pytest.mark.parametrize("stages", [1, 3])
def test_experts_of_several_ranks_are_read(stages: int, is_grouped: bool, tmp_path: Path) -> None:
    """Modules of single experts, and Transformer Engine's modules of all experts of a rank."""
    shape = Architecture(**{**dense.ARCHITECTURES["qwen3_moe"].model_dump(), "num_experts": 6})
    tensors = random_tensors(shape, 3)
    source = megatron_names.in_memory(shape, tensors)
    writer.write(tmp_path / "a", source, "megatron", Target(ParallelLayout(1, stages)))
    divided(tmp_path / "a", 3, is_grouped=is_grouped)
    checkpoint = open_any(tmp_path / "a")
    assert checkpoint.layout == ParallelLayout(1, stages, expert_parallel_size=3)
    assert {*checkpoint.source} == {f"model.{name}" for name in tensors}
    for name, tensor in tensors.items():
        assert torch.equal(checkpoint.source.read(f"model.{name}"), tensor), name


@pytest.mark.parametrize(
    ("size", "arguments", "message"),
    [
        (3, {"expert_model_parallel_size": 2}, "of 3 expert-parallel ranks, its arguments say 2"),
        (2, {}, "expert_parallel_size: 2: does not divide 3 experts, as Megatron needs; give one"),
        (3, {"expert_tensor_parallel_size": 4}, "expert_tensor_parallel_size: 4: other ranks"),
    ],
)
def test_files_that_do_not_fit_the_ranks_are_refused(
    size: int, arguments: dict[str, Any], message: str, tmp_path: Path
) -> None:
    shape = dense.ARCHITECTURES["mixtral-tied"]
    megatron_names.write(tmp_path / "a", "megatron", shape, random_tensors(shape, 1))
    divided(tmp_path / "a", size, is_grouped=False, **arguments)
    with pytest.raises(UserError, match=message):
        open_any(tmp_path / "a")


def test_a_model_without_experts_has_no_expert_parallel_ranks(tmp_path: Path) -> None:
    shape = dense.ARCHITECTURES["qwen2"]
    source = megatron_names.in_memory(shape, random_tensors(shape, 1))
    with pytest.raises(UserError, match="expert_parallel_size: 2: family qwen2 has no experts"):
        target = Target(ParallelLayout(expert_parallel_size=2))
        writer.write(tmp_path / "a", source, "torch_dist", target)


def test_tensor_parallel_ranks_divide_no_experts_with_biases(tmp_path: Path) -> None:
    shape = dense.spread("gpt_oss")
    source = megatron_names.in_memory(shape, random_tensors(shape, 1))
    with pytest.raises(UserError, match="tensor_parallel_size: 2: Megatron divides no experts"):
        writer.write(tmp_path / "a", source, "megatron", Target(ParallelLayout(2)))


@pytest.mark.parametrize("kind", ["mds_pipeline", "universal"])
def test_experts_of_deepspeed_are_refused(kind: str, tmp_path: Path) -> None:
    shape = dense.ARCHITECTURES["mistral"]
    megatron_names.write(tmp_path / "a", kind, shape, random_tensors(shape, 1))
    megatron_names.remove_tokamake_arguments(tmp_path / "a", num_experts=[1, 1])
    assert open_any(tmp_path / "a").architecture.family == "llama"
    megatron_names.remove_tokamake_arguments(tmp_path / "a", num_experts=[8])
    with pytest.raises(
        UserError, match=r"\.pt: args\.num_experts: \[8\]: DeepSpeed's experts have"
    ):
        open_any(tmp_path / "a")


@pytest.mark.parametrize("is_grouped", [False, True])
def test_buckets_have_the_experts_in_the_order_of_their_modules(is_grouped: bool) -> None:
    """Modules of Transformer Engine have the first projections of all experts of a rank first."""
    shape = dense.ARCHITECTURES["qwen3_moe"]
    rank = TensorParallelRank(shape, Axis(0, 1), 256)
    layers = range(shape.num_hidden_layers)
    slices = dict(module_tree.named_slices(module_tree.stage_tree(rank, layers)))
    order = ["embedding.word_embeddings.weight"]
    for layer in layers:
        experts = [f"local_experts.{n}.linear_fc{i}" for n in range(7) for i in (1, 2)]
        if is_grouped:
            experts = sorted(experts, key=lambda name: name[-1])
        order += [
            f"encoder.layers.{layer}.{name}.weight"
            for name in (
                *("self_attention.dense", "input_layernorm", "self_attention.query_key_value"),
                *("self_attention.q_layernorm", "self_attention.k_layernorm"),
                *("pre_mlp_layernorm", "mlp.router"),
                *(f"mlp.experts.{name}" for name in experts),
            )
        ]
    order += ["encoder.final_layernorm.weight", "output_layer.weight"]
    tensors = [slices[f"language_model.{name}"] for name in order]
    assert len(tensors) == len(slices)
    starts, size = buffer_places([tensor.shape for tensor in tensors])
    chunks = tuple(StoredChunk((start,), (1,), None) for start in starts)
    chunks += tuple(
        StoredChunk((start + math.prod(tensor.shape),), (1,), None)
        for start, tensor in zip(starts, tensors, strict=True)
    )
    bucket = WholeTensor((size,), FLOAT32, chunks)
    model = StoredModel(shape, 256, ParallelLayout(), {}, is_fp32=True, first_keys={})
    (found,) = optimizer_reader._fitting_order(slices, [bucket], model=model)
    expected = dict(zip(starts, tensors, strict=True))
    assert {parameter.start: parameter.tensor for parameter in found} == expected
