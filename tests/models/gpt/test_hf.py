"""GPTs in Hugging Face's folders equal transformers', bit by bit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoint.test_init_model import words
from tests.support import hf_folder, runs
from tests.support.forked import train
from tests.support.gpts import ARCHITECTURES, LEARNED, MQA, reference
from tests.support.random_tensors import random_tensors
from tokamake.checkpoint.convert import convert
from tokamake.checkpoint.hf import config_json
from tokamake.checkpoint.init_model import init_model
from tokamake.errors import UserError


def edit(path: Path, **values: Any) -> None:
    config = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in config.items() if value != "absent"}))


def test_a_stored_copy_of_a_tied_output_layer_is_ignored(tmp_path: Path) -> None:
    reference(LEARNED).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"lm_head.weight": tensors["transformer.wte.weight"].clone()}, file)
    assert "lm_head.weight" not in hf_folder.read(tmp_path)[1]
    save_file(tensors | {"lm_head.weight": torch.ones(131, 64)}, file)
    with pytest.raises(UserError, match=r"differs from transformer\.wte\.weight, but config\.json"):
        hf_folder.read(tmp_path)


def test_errors_show_shapes_as_stored(tmp_path: Path) -> None:
    reference(LEARNED).save_pretrained(tmp_path)
    edit(tmp_path / "config.json", n_inner=96)
    wrong = r"h\.0\.mlp\.c_fc\.weight has shape \[64, 256\], the architecture calls for \[64, 96\]"
    with pytest.raises(UserError, match=wrong):
        hf_folder.read(tmp_path)


def test_missing_keys_mean_transformers_defaults(tmp_path: Path) -> None:
    from transformers import BloomConfig, GPT2Config, GPTBigCodeConfig, Starcoder2Config

    for kind in (GPT2Config, GPTBigCodeConfig, Starcoder2Config, BloomConfig):
        theirs = kind(hidden_size=64, num_attention_heads=4, num_hidden_layers=2, vocab_size=60000)
        plain = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
        plain |= {"model_type": kind.model_type, "vocab_size": 60000}
        if kind is Starcoder2Config:
            plain["intermediate_size"] = theirs.intermediate_size
        (tmp_path / "config.json").write_text(json.dumps(plain))
        few = config_json.read_config(tmp_path)[0]
        theirs.save_pretrained(tmp_path)
        assert config_json.read_config(tmp_path)[0] == few


@pytest.mark.parametrize("name", ["gpt2", "gpt_bigcode", "starcoder2", "bloom"])
def test_init_import_export_keep_every_bit(tmp_path: Path, name: str) -> None:
    values = ARCHITECTURES[name].model_dump(exclude_none=True) | {"vocab_size": 300}
    (tmp_path / "a.yaml").write_text(json.dumps(values))
    init, imported, exported = (tmp_path / name for name in ("init", "import", "export"))
    init_model(
        architecture=tmp_path / "a.yaml", tokenizer=words(tmp_path, 300), seed=1, output=init
    )
    convert(source=init, target=imported, format="native")
    convert(source=imported, target=exported, format="hf")
    for file in ("config.json", "model.safetensors"):
        assert (init / file).read_bytes() == (exported / file).read_bytes()


@pytest.mark.grid
@pytest.mark.ranks
def test_training_goes_from_random_weights_to_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    architecture = MQA.model_copy(update={"vocab_size": 120})
    root = runs.prepare(tmp_path)
    start = random_tensors(architecture, 5)
    runs.write_start(root / "start", architecture, start)
    trained = []
    for name, ranks, parallel in (
        ("one", 1, {}),
        ("two", 2, {"tensor_parallel_size": 2, "sequence_parallel": True}),
    ):
        run = runs.make_run(root, name, train_steps=4, save_interval=4, parallel=parallel)
        train(run, ranks=ranks)
        convert(source=root / name / "training", target=root / name / "hf", format="hf")
        trained.append(hf_folder.read(root / name / "hf")[1])
        model = AutoModelForCausalLM.from_pretrained(root / name / "hf")
        assert type(model).__name__ == "GPTBigCodeForCausalLM"
    for name, tensor in trained[0].items():
        # Biases of keys do not change the softmax: AdamW amplifies their rounding errors.
        if not name.endswith("k_proj.bias"):
            torch.testing.assert_close(trained[1][name], tensor, atol=1e-4, rtol=1e-4)
        assert not torch.equal(tensor, start[name])
