"""The stages from an architecture file to tokamake's own checkpoints and back to Hugging Face."""

import hashlib
from functools import partial
from pathlib import Path

import pytest
import tokenizers
import torch
from tokenizers import models

from tests.support import hf_folder
from tests.support.peak_memory import peak_of
from tests.support.random_tensors import random_tensors
from tokamake.checkpoint.convert import convert
from tokamake.checkpoint.hf import config_json
from tokamake.checkpoint.init_model import init_model
from tokamake.checkpoint.tensors.checkpoint import Target
from tokamake.errors import UserError

SHAPE = """\
family: llama
hidden_size: 32
intermediate_size: 48
num_hidden_layers: 2
num_attention_heads: 4
num_key_value_heads: 2
"""


def _hashes(folder: Path) -> dict[str, str]:
    return {
        name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
        for name, tensor in hf_folder.read(folder)[1].items()
    }


def words(folder: Path, entries: int) -> Path:
    """A tokenizer of so many words."""
    path = folder / f"words{entries}"
    path.mkdir(exist_ok=True)
    vocabulary = {f"w{number}": number for number in range(entries - 1)} | {"</s>": entries - 1}
    tokenizers.Tokenizer(models.WordLevel(vocabulary, "w0")).save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    return path


@pytest.fixture
def yaml(tmp_path: Path) -> Path:
    """An architecture file without a vocabulary."""
    path = tmp_path / "tiny.yaml"
    path.write_text(SHAPE)
    return path


def test_init_import_export_keep_every_bit(
    yaml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    init, imported, exported = (tmp_path / name for name in ("init", "import", "export"))
    init_model(architecture=yaml, tokenizer=words(tmp_path, 300), seed=1, output=init)
    convert(source=init, target=imported, format="native")
    convert(source=imported, target=exported, format="hf")
    assert _hashes(init) == _hashes(exported)
    assert (init / "config.json").read_bytes() == (exported / "config.json").read_bytes()
    size = "34,720 parameters in 21 tensors"
    assert capsys.readouterr().out.splitlines() == [
        f"{init}: {size}, fp32, random with seed 1, from {yaml}, and "
        "tokenizer.json, tokenizer_config.json",
        f"{imported}: tokamake (torch distributed checkpoint), {size}, from {init}",
        "left behind: tokenizer (tokenizer.json, tokenizer_config.json)",
        f"{exported}: Hugging Face, {size}, from {imported}",
    ]


def test_transformers_loads_the_model_and_its_tokenizer(yaml: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    init_model(architecture=yaml, tokenizer=words(tmp_path, 300), seed=1, output=tmp_path / "init")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "init")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "init")
    assert tokenizer.convert_tokens_to_ids(["w7", "</s>"]) == [7, 299]
    assert model.config.eos_token_id == tokenizer.eos_token_id == 299


def test_the_same_seed_gives_the_same_files(yaml: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        init_model(
            architecture=yaml, tokenizer=words(tmp_path, 300), seed=seed, output=tmp_path / name
        )
        target = tmp_path / f"{name}-import"
        convert(source=tmp_path / name, target=target, format="native")
    file = Path("global_step0") / "__0_0.distcp"
    a, b, c = ((tmp_path / f"{name}-import" / file).read_bytes() for name in "abc")
    assert a == b != c


def test_vocab_size_defaults_to_the_tokenizers(yaml: Path, tmp_path: Path) -> None:
    init_model(architecture=yaml, tokenizer=words(tmp_path, 300), seed=1, output=tmp_path / "a")
    assert config_json.read_config(tmp_path / "a")[0].vocab_size == 300
    yaml.write_text(SHAPE + "vocab_size: 320\n")
    init_model(architecture=yaml, tokenizer=words(tmp_path, 300), seed=1, output=tmp_path / "b")
    assert config_json.read_config(tmp_path / "b")[0].vocab_size == 320
    with pytest.raises(UserError, match=r"tiny\.yaml: vocab_size: 320 is less than .* 321 entries"):
        init_model(architecture=yaml, tokenizer=words(tmp_path, 321), seed=1, output=tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    tokenizer, peaks = words(tmp_path, 300), []
    for layers in (1, 5):
        path = tmp_path / f"{layers}.yaml"
        sizes = f"hidden_size: 512\nintermediate_size: 2048\nnum_hidden_layers: {layers}\n"
        heads = "num_attention_heads: 4\nnum_key_value_heads: 4\nmax_position_embeddings: 64\n"
        path.write_text(f"family: llama\n{sizes}{heads}")
        options = (f"--architecture={path}", f"--tokenizer={tokenizer}", "--seed=1")
        peaks.append(peak_of("init-model", *options, f"--output={tmp_path / str(layers)}"))
    weights = (tmp_path / "5/model.safetensors").stat().st_size
    assert weights > 80e6
    assert peaks[1] - peaks[0] < weights / 4


def test_a_large_model_is_written_shard_by_shard(
    yaml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards hold the same numbers as one file."""
    small = partial(Target, max_shard_bytes=40_000)
    monkeypatch.setattr("tokamake.checkpoint.tensors.checkpoint.Target", small)
    tokenizer = words(tmp_path, 300)
    init_model(architecture=yaml, tokenizer=tokenizer, seed=1, output=tmp_path / "a")
    assert len([*(tmp_path / "a").glob("model-*.safetensors")]) == 4
    architecture, tensors = hf_folder.read(tmp_path / "a")
    expected = random_tensors(architecture, 1)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())
