"""Hugging Face folders are exchanged with transformers in both directions."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support import hf_folder
from tests.support.llamas import ARCHITECTURES, label, reference, tensors_of
from tests.support.random_tensors import random_tensors
from tokamake.checkpoint.hf import config_json
from tokamake.errors import UserError

PLAIN, TIED = ARCHITECTURES[5], ARCHITECTURES[7]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that transformers wrote."""
    reference(PLAIN).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def _edit(path: Path, **values: Any) -> None:
    config = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in config.items() if value != "absent"}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("architecture", [PLAIN, TIED], ids=label)
def test_transformers_loads_what_we_write(
    tmp_path: Path, architecture: Any, dtype: torch.dtype
) -> None:
    from transformers import AutoModelForCausalLM

    model = reference(architecture, dtype)
    hf_folder.write(tmp_path / "a", architecture, tensors_of(model, architecture))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "a", dtype="auto").eval()
    tokens = torch.arange(24).view(2, 12)
    with torch.no_grad():
        assert loaded.dtype == dtype
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    assert loaded.config.eos_token_id is loaded.generation_config.eos_token_id is None
    assert loaded.config.bos_token_id is None
    assert loaded.config.rope_parameters["rope_theta"] == 5000.0
    again, tensors = hf_folder.read(tmp_path / "a")
    assert again == architecture
    assert {tensor.dtype for tensor in tensors.values()} == {dtype}


def test_a_failed_write_leaves_the_old_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf_folder.write(tmp_path / "a", PLAIN, random_tensors(PLAIN, 1))
    before = (tmp_path / "a" / "model.safetensors").read_bytes()
    monkeypatch.setattr(hf_folder, "fill", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        hf_folder.write(tmp_path / "a", PLAIN, random_tensors(PLAIN, 2))
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_reads_the_config_of_transformers_4(folder: Path) -> None:
    _edit(folder / "config.json", rope_parameters="absent", rope_scaling=None, rope_theta=77.0)
    assert config_json.read_config(folder)[0].rope_theta == 77.0
    _edit(folder / "config.json", rope_theta="absent", num_key_value_heads="absent")
    architecture = config_json.read_config(folder)[0]
    assert architecture.rope_theta == 10000.0
    assert architecture.num_key_value_heads == architecture.num_attention_heads


def test_rotary_buffers_of_old_checkpoints_are_left_out(folder: Path) -> None:
    file = folder / "model.safetensors"
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    save_file(load_file(file) | extra, file)
    assert hf_folder.read(folder)[1].keys() == random_tensors(PLAIN, 0).keys()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"model_type": "xlnet"},
            "model_type: 'xlnet' is not known; choose a model of",
        ),
        ({"model_type": "absent"}, "model_type: None is not known"),
        ({"attention_bias": "some"}, "attention_bias: 'some': input should be a valid boolean"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu': llama has silu only"),
        ({"hidden_act": "mish"}, "hidden_act: 'mish': llama has silu only"),
        (
            {"quantization_config": {"bits": 4}},
            "quantization_config: the folder holds quantized weights; dequantize the model",
        ),
        ({"head_dim": 15}, "head_dim 15 is odd; rotary needs pairs"),
        (
            {"rope_scaling": {"type": "xpos", "factor": 2}},
            "rope_scaling: .*xpos.* is not .* of default, linear, dynamic, llama3, yarn, longrope$",
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 2.0}},
            "rope_scaling.rope_type llama3 needs high_freq_factor, low_freq_factor; add it",
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 0.5}},
            r"rope_scaling\.factor: 0\.5: input should be greater than or equal to 1",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5 is .* that turns whole"),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            "partial_rotary_factor: 0.5 is not",
        ),
        ({"rope_parameters": {"rope_theta": "high"}}, "rope_theta: 'high'"),
        ({"vocab_size": "absent"}, "vocab_size: missing"),
        ({"hidden_size": "absent"}, "hidden_size: missing"),
        (
            {"num_attention_heads": 3},
            "num_attention_heads: 3: not a multiple of num_key_value_heads",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_configs_beyond_the_family_are_refused(
    folder: Path, values: dict[str, Any], message: str
) -> None:
    _edit(folder / "config.json", **values)
    with pytest.raises(UserError, match=message) as error:
        hf_folder.read(folder)
    assert str(error.value).startswith(f"{folder / 'config.json'}: ")
    assert "\n" not in str(error.value)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("scaling", "ignored"),
    [
        (YARN | {"attn_factor": 0.8782488562869419}, {"attn_factor"}),
        (YARN | {"finetuned": True, "attention_factor": 1.5}, {"finetuned"}),
        ({"type": "linear", "factor": 2.0, "beta_fast": 3}, {"beta_fast"}),
        ({"rope_type": "default", "factor": 2.0}, {"factor"}),
    ],
    ids=["attn_factor", "finetuned", "beta_fast", "default"],
)
def test_settings_of_positions_that_transformers_ignores_are_ignored(
    folder: Path, scaling: dict[str, Any], ignored: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    config = folder / "config.json"
    used = {key: value for key, value in scaling.items() if key not in ignored}
    _edit(config, rope_parameters="absent", rope_scaling=used)
    expected = config_json.read_config(folder)[0]
    assert not caplog.text
    _edit(config, rope_scaling=scaling, auto_map={"AutoModel": "code.Model"})
    for _ in range(2):
        assert config_json.read_config(folder)[0] == expected
    assert [record.getMessage() for record in caplog.records] == [
        f"{config}: auto_map: the model's own Python code is not run; the model is built as "
        "transformers builds the type llama",
        f"{config}: rope_scaling.{next(iter(ignored))}: ignored, as transformers ignores it",
    ]
