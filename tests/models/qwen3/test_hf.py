"""qwen3 in transformers' folders and in Megatron's formats: read, written, refused."""

import json
from pathlib import Path

import pytest
import torch

from tests.support import megatron_names
from tests.support.qwens import ARCHITECTURES, qwen3, reference
from tests.support.random_tensors import random_tensors
from tokamake.checkpoint.convert import convert
from tokamake.checkpoint.detect import open_any
from tokamake.checkpoint.hf import config_json
from tokamake.generate.generate import Ends, generate
from tokamake.inference.sampling_settings import Sampling

SHAPE = ARCHITECTURES["qwen3"]


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
