"""qwen3 in transformers' folders and in Megatron's formats: read, written, refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import hf_folder, megatron_names
from tests.support.qwens import ARCHITECTURES, qwen3, reference
from tests.support.random_tensors import random_tensors
from tokamake.checkpoint.convert import convert
from tokamake.checkpoint.detect import open_any
from tokamake.checkpoint.hf import config_json
from tokamake.errors import UserError
from tokamake.generate.generate import Ends, generate
from tokamake.inference.sampling import Sampling

SHAPE = ARCHITECTURES["qwen3"]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_folders_of_transformers_are_read_and_written(name: str, tmp_path: Path) -> None:
    model = reference(ARCHITECTURES[name])
    model.save_pretrained(tmp_path / "theirs")
    architecture, tensors = hf_folder.read(tmp_path / "theirs")
    assert architecture == ARCHITECTURES[name]
    assert all(torch.equal(tensors[key], model.state_dict()[key]) for key in tensors)
    hf_folder.write(tmp_path / "ours", architecture, tensors)
    again = type(model).from_pretrained(tmp_path / "ours").eval()
    tokens = torch.arange(40).view(2, 20)
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, model(tokens).logits)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """config.json of a folder."""
    hf_folder.write(tmp_path / "hf", SHAPE, random_tensors(SHAPE, 1))
    return tmp_path / "hf/config.json"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"attention_bias": True}, "attention_bias: True is not supported; choose a model with F"),
        ({"use_sliding_window": True}, "use_sliding_window: True is not supported"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types: 'sliding_att"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu': qwen3 has silu only"),
        ({"head_dim": 7}, "head_dim 7 is odd; rotary needs pairs"),
    ],
)
def test_configs_beyond_the_family_are_refused(
    values: dict[str, Any], message: str, config: Path
) -> None:
    config.write_text(json.dumps(json.loads(config.read_text()) | values))
    with pytest.raises(UserError, match=message):
        hf_folder.read(config.parent)


def test_a_config_without_head_dim_means_128(config: Path) -> None:
    values = json.loads(config.read_text())
    assert values.pop("head_dim") == 24
    config.write_text(json.dumps(values))
    assert config_json.read_config(config.parent)[0].head_dim == 128


def test_tensors_and_arguments_are_megatrons(tmp_path: Path) -> None:
    tensors = random_tensors(SHAPE, 3)
    megatron_names.write(tmp_path / "m", "megatron", SHAPE, tensors)
    (file,) = tmp_path.rglob("*.pt")
    state = torch.load(file, weights_only=False)
    layers = state["model"]["language_model"]["encoder"]
    for each in "qk":
        norm = layers[f"layers.2.self_attention.{each}_layernorm.weight"]
        assert torch.equal(norm, tensors[f"model.layers.2.self_attn.{each}_norm.weight"])
    args = vars(state["args"])
    assert args["qk_layernorm"] is args["swiglu"] is True
    assert (args["kv_channels"], args["normalization"]) == (24, "RMSNorm")
    megatron_names.remove_tokamake_arguments(tmp_path / "m")
    assert open_any(tmp_path / "m").architecture == SHAPE


def test_megatron_deepspeed_has_no_argument_for_the_norms(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convert(source=config.parent, target=tmp_path / "mds", format="mds")
    assert "has no argument for norms of query and key heads" in capsys.readouterr().err


def test_greedy_generation_equals_transformers(sampled: Path, tmp_path: Path) -> None:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(sampled / "tokenizer")
    model = reference(qwen3(vocab_size=len(tokenizer)))
    model.save_pretrained(tmp_path / "model")
    generate(
        checkpoint=tmp_path / "model",
        tokenizer=sampled / "tokenizer",
        output=tmp_path / "samples.json",
        prompts=("def ",),
        ends=Ends(max_new_tokens=20),
        sampling=Sampling(temperature=0.0),
    )
    (sample,) = json.loads((tmp_path / "samples.json").read_text(encoding="utf-8"))
    tokens = torch.tensor([tokenizer("def ")["input_ids"]])
    continuation = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        do_sample=False,
        max_new_tokens=20,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=0,
    )[0, tokens.shape[1] :].tolist()
    expected = [token for token in continuation if token != tokenizer.eos_token_id]
    assert sample["text"] == tokenizer.decode(expected)
