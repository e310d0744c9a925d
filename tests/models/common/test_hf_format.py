"""Configs that are refused because transformers computes another model from them than it seems."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import dense, hf_folder
from tests.support.random_tensors import random_tensors
from tokamake.checkpoint.convert import convert
from tokamake.errors import UserError

FULL, WINDOW = "full_attention", "sliding_attention"
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}
ROPE = {"rope_type": "default", "rope_theta": 300.0}
OLMO3 = dense.dense("olmo3", sliding_window=7, head_dim=32, num_hidden_layers=4)
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
    "rope_theta": 1e4,
}


def logits(folder: Path, **values: Any) -> Tensor:
    """Logits of transformers with other values in config.json; "absent" removes a key."""
    from transformers import AutoModelForCausalLM

    path = folder / "config.json"
    before = path.read_text()
    changed = json.loads(before) | values
    path.write_text(json.dumps({key: each for key, each in changed.items() if each != "absent"}))
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    path.write_text(before)
    with torch.no_grad():
        result: Tensor = model(torch.arange(48).view(2, 24)).logits
    return result


@pytest.mark.parametrize(
    ("architecture", "values", "seeming", "message"),
    [
        (
            "mistral-window",
            {"layer_types": [FULL, WINDOW, WINDOW]},
            {},
            "layer_types: 'full_attention' is not supported with sliding_window 7",
        ),
        (
            "gpt_oss",
            {"layer_types": "absent", "sliding_window_pattern": 3},
            {"layer_types": [WINDOW, WINDOW, FULL]},
            "sliding_window_pattern: 3: transformers does not read it",
        ),
        (
            "gpt_oss",
            {"num_experts_per_tok": "absent", "experts_per_token": 2},
            {"num_experts_per_tok": 2},
            "experts_per_token: 2: num_experts_per_tok is None; give both one value",
        ),
        (
            "gemma3",
            {"rope_parameters": ROPE},
            {"rope_parameters": {FULL: ROPE, WINDOW: ROPE | {"rope_theta": 1e4}}},
            "gemma3_text needs the keys full_attention and sliding_attention alone",
        ),
        (
            "gpt_neox",
            {"rope_parameters": {FULL: LINEAR}},
            {"rope_parameters": LINEAR},
            "rope_parameters: .* gpt_neox needs the same positions for all layers",
        ),
        (
            OLMO3,
            {"rope_parameters": {FULL: YARN | {"truncate": False}}},
            {"rope_parameters": {FULL: YARN, "truncate": False}},
            "rope_parameters: truncate: transformers does not read it in models of type olmo3",
        ),
        (
            "deepseek_v3",
            {"norm_topk_prob": None},
            {"norm_topk_prob": True},
            "norm_topk_prob: None is not supported; choose a model with True",
        ),
        (
            "deepseek_v3",
            {"rope_interleave": None},
            {"rope_interleave": True},
            "rope_interleave: None is not supported; choose a model with True",
        ),
        (
            "deepseek_v2",
            {"rope_parameters": LINEAR | {"mscale_all_dim": 2.0}},
            {"rope_parameters": LINEAR},
            "rope_parameters.mscale_all_dim: 2.0 is not supported with rope_type linear",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_configs_of_another_model_than_it_seems_are_refused(
    architecture: Any,
    values: dict[str, Any],
    seeming: dict[str, Any],
    message: str,
    tmp_path: Path,
) -> None:
    if isinstance(architecture, str):
        architecture = dense.ARCHITECTURES[architecture]
    weights = {name: 5 * each for name, each in random_tensors(architecture, 1).items()}
    hf_folder.write(tmp_path / "a", architecture, weights)
    difference = logits(tmp_path / "a", **values) - logits(tmp_path / "a", **seeming)
    assert difference.abs().max() > 1e-4
    path = tmp_path / "a/config.json"
    changed = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: each for key, each in changed.items() if each != "absent"}))
    with pytest.raises(UserError, match=message) as error:
        hf_folder.read(tmp_path / "a")
    assert str(error.value).startswith(f"{path}: ")


def test_both_keys_of_positions_count_as_in_transformers(tmp_path: Path) -> None:
    architecture = dense.ARCHITECTURES["gemma3"]
    hf_folder.write(tmp_path / "a", architecture, random_tensors(architecture, 1))
    path = tmp_path / "a/config.json"
    values = {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rope_theta": 20.0}
    values |= {"rope_parameters": {FULL: ROPE, WINDOW: ROPE | {"rope_theta": 9.0}}}
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    read, tensors = hf_folder.read(tmp_path / "a")
    assert (read.rope_theta, read.local_rope_theta) == (300.0, 9.0)
    theirs = logits(tmp_path / "a")
    hf_folder.write(tmp_path / "b", read, tensors)
    assert torch.equal(logits(tmp_path / "b"), theirs)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("mistral", {"layer_types": -1}, "the value of a key has a wrong type"),
        ("mistral", {"rope_parameters": "x"}, "the value of a key has a wrong type"),
        ("mistral", {"model_type": ["mistral"]}, r"model_type: \['mistral'\] is not known"),
        ("gemma2", {"query_pre_attn_scalar": None}, "the value of a key has a wrong type"),
        ("gemma2", {"layer_types": [WINDOW]}, "layer_types: has 1 entries for 3 layers"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers: has 1 entries for 3 layers"),
        ("phi3", {"partial_rotary_factor": "x", "rope_parameters": None}, "a wrong type"),
        ("deepseek_v2", {"num_experts_per_tok": None}, "num_experts_per_tok: missing; add it"),
        ("deepseek_v2", {"head_dim": 64}, "head_dim: 64: models of type deepseek_v2 have 6, which"),
        ("qwen3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5 is not supported"),
    ],
    ids=str,
)
def test_damaged_configs_are_refused_in_one_line(
    name: str, values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    shape = dense.dense("qwen3") if name == "qwen3" else dense.ARCHITECTURES[name]
    hf_folder.write(tmp_path / "a", shape, random_tensors(shape, 1))
    path = tmp_path / "a/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    with pytest.raises(UserError, match=message) as error:
        hf_folder.read(tmp_path / "a")
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("format", ["hf", "native"])
def test_biases_that_balance_experts_stay_fp32(format: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    shape = dense.ARCHITECTURES["deepseek_v3"]
    tensors = random_tensors(shape, 1)
    name = "layers.1.mlp.gate.e_score_correction_bias"
    tensors["model." + name] += torch.linspace(0.1, 0.2, 9)
    hf_folder.write(tmp_path / "a", shape, tensors)
    convert(source=tmp_path / "a", target=tmp_path / "b", format=format, dtype="bf16")
    if format == "native":
        convert(source=tmp_path / "b", target=tmp_path / "c", format="hf")
    folder = tmp_path / ("b" if format == "hf" else "c")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert model.dtype == torch.bfloat16
    assert torch.equal(
        model.model.layers[1].mlp.gate.e_score_correction_bias, tensors["model." + name]
    )
