"""Folders of every model type of transformers are opened, and laid out for transformers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from transformers import AutoConfig

from tests.support import gpts, hf_folder, llamas
from tests.support.families import FAMILIES
from tests.support.hf_folder import SHARD, from_hf, pickled, reference
from tests.support.random_tensors import random_tensors
from tokamake.checkpoint.hf import config_json
from tokamake.checkpoint.hf import format as hf_format
from tokamake.checkpoint.model_tensors import to_model
from tokamake.checkpoint.tensors import chunks
from tokamake.checkpoint.tensors.checkpoint import Checkpoint, Target
from tokamake.checkpoint.tensors.copy import fill
from tokamake.checkpoint.tensors.extents import Extent
from tokamake.config.architecture import Architecture
from tokamake.errors import UserError

MODELS = {
    **{f"llama-{llamas.label(each)}": each for each in llamas.ARCHITECTURES},
    "llama-biased": llamas.BIASED,
    **gpts.ARCHITECTURES,
}
PLAIN, TIED = llamas.ARCHITECTURES[5], llamas.ARCHITECTURES[7]
LEARNED, MQA = gpts.LEARNED, gpts.MQA


def check(opened: Checkpoint, expected: dict[str, torch.Tensor]) -> None:
    assert list(opened.source) == [f"model.{name}" for name in expected]
    for name, tensor in expected.items():
        stored = opened.source.read(f"model.{name}")
        assert stored.dtype == tensor.dtype
        assert torch.equal(stored, tensor), name


def write(folder: Path, opened: Checkpoint, target: Target = Target()) -> list[Extent]:  # noqa: B008
    folder.mkdir()
    extents = hf_format.lay_out(folder, opened, target=target)
    assert {*fill(extents, opened.source, keys=[*opened.source])} == {*opened.source}
    return extents


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.train()(torch.arange(24).view(2, 12)).logits  # there is no dropout


@pytest.mark.parametrize("name", MODELS)
def test_files_of_transformers_are_read_and_written_again(tmp_path: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM

    model, whole, sharded = reference(MODELS[name]), tmp_path / "whole", tmp_path / "sharded"
    model.save_pretrained(whole)
    model.save_pretrained(sharded, max_shard_size=SHARD)
    assert len([*whole.glob("*.safetensors")]) == 1 < len([*sharded.glob("*.safetensors")])
    architecture, expected = hf_folder.read(whole)
    assert architecture == MODELS[name]
    tensors = from_hf(architecture, gpts.tensors_of(model))
    assert expected.keys() == tensors.keys()
    assert all(torch.equal(tensor, tensors[key]) for key, tensor in expected.items())
    for folder in (whole, sharded):
        assert hf_format.find(folder) == folder
        opened = hf_format.open_checkpoint(folder)
        assert opened.architecture == architecture
        check(opened, expected)
    write(tmp_path / "ours", opened)
    assert load_file(tmp_path / "ours/model.safetensors").keys() == gpts.tensors_of(model).keys()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype="auto")
    assert type(loaded) is type(model)
    assert torch.equal(logits(loaded), logits(model))
    check(hf_format.open_checkpoint(tmp_path / "ours"), expected)


@pytest.mark.parametrize("name", MODELS)
def test_files_are_those_of_safetensors(tmp_path: Path, name: str) -> None:
    hf_folder.write(tmp_path / "a", MODELS[name], random_tensors(MODELS[name], 1))
    extents = write(tmp_path / "b", hf_format.open_checkpoint(tmp_path / "a"))
    assert all(extent.offset % extent.dtype.itemsize == 0 for extent in extents)
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes(), file.name
        assert file.stat().st_mode == (tmp_path / "b" / file.name).stat().st_mode
    assert len([*(tmp_path / "b").iterdir()]) == 3


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("name", ["llama-kv2-tied-131", *gpts.ARCHITECTURES])
def test_pickled_files_are_read(tmp_path: Path, name: str, shards: int) -> None:
    reference(MODELS[name], torch.bfloat16).save_pretrained(tmp_path)
    expected = hf_folder.read(tmp_path)[1]
    pickled(tmp_path, shards=shards)
    assert hf_format.find(tmp_path) == tmp_path
    check(hf_format.open_checkpoint(tmp_path), expected)


def test_a_pickled_state_dict_with_its_tied_output_layer_is_read(tmp_path: Path) -> None:
    model = reference(LEARNED)
    model.save_pretrained(tmp_path)
    expected = hf_folder.read(tmp_path)[1]
    (tmp_path / "model.safetensors").unlink()
    buffers = {
        "transformer.h.0.attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.bool).expand(2, 1, 8, 8)
    }
    state = model.state_dict()
    assert state["lm_head.weight"].data_ptr() == state["transformer.wte.weight"].data_ptr()
    torch.save(state | buffers, tmp_path / "pytorch_model.bin")
    opened = hf_format.open_checkpoint(tmp_path)
    check(opened, expected)
    assert [extent.name for extent in opened.source.extents if extent.is_replica] == [
        "lm_head.weight"
    ]


def test_tensors_saved_as_transposed_views_are_read(tmp_path: Path) -> None:
    reference(PLAIN).save_pretrained(tmp_path)
    expected = hf_folder.read(tmp_path)[1]
    turned = {
        name: each.mT.contiguous().mT if "proj" in name else each for name, each in expected.items()
    }
    (tmp_path / "model.safetensors").unlink()
    torch.save(turned, tmp_path / "pytorch_model.bin")
    check(hf_format.open_checkpoint(tmp_path), expected)


def test_multi_head_bigcode_models_are_read(tmp_path: Path) -> None:
    model = gpts.reference(LEARNED, multi_query=False)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "gpt_bigcode"
    opened = hf_format.open_checkpoint(tmp_path)
    assert opened.notes["model_type"] == "gpt_bigcode"
    assert opened.architecture == LEARNED
    tensors = hf_folder.read(tmp_path)[1]
    check(opened, tensors)
    tokens = torch.arange(24).view(2, 12)
    with torch.no_grad():
        ours = to_model(LEARNED, tensors)(tokens)
        torch.testing.assert_close(ours, model(tokens).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "architecture",
    [PLAIN, LEARNED, gpts.ALIBI, gpts.ROTARY],
    ids=["llama", "gpt2", "bloom", "starcoder2"],
)
def test_names_without_prefix_and_old_buffers_are_read(
    tmp_path: Path, architecture: Architecture
) -> None:
    reference(architecture).save_pretrained(tmp_path)
    expected = hf_folder.read(tmp_path)[1]
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    bare = {n.removeprefix("transformer.").removeprefix("model."): t for n, t in tensors.items()}
    for name in ("h.0.attn.bias", "h.0.attn.masked_bias", "layers.0.self_attn.rotary_emb.inv_freq"):
        bare[name] = torch.ones(1, 1, 8, 8, dtype=torch.uint8)
    save_file(bare, file)
    check(hf_format.open_checkpoint(tmp_path), expected)
    save_file({n: t for n, t in bare.items() if n not in ("ln_f.weight", "norm.weight")}, file)
    with pytest.raises(UserError, match=r"tensor \w+\.\w+\.weight is missing"):
        hf_format.open_checkpoint(tmp_path)


def test_a_stored_copy_of_the_tied_output_layer_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "SLAB", 1000)  # many slices and a part of one
    hf_folder.write(tmp_path, TIED, random_tensors(TIED, 1))
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    embedding = tensors["model.embed_tokens.weight"]
    expected = hf_folder.read(tmp_path)[1]
    save_file(tensors | {"lm_head.weight": embedding.clone()}, file)
    check(hf_format.open_checkpoint(tmp_path), expected)
    other = embedding.clone()
    other[-1, -1] += 1
    save_file(tensors | {"lm_head.weight": other}, file)
    with pytest.raises(UserError, match=r"lm_head\.weight differs .* set it to false"):
        hf_format.open_checkpoint(tmp_path)
    for head in (other, embedding.bfloat16(), embedding[:-1].clone(), embedding[:0].clone()):
        save_file(tensors | {"lm_head.weight": head}, file)
        with pytest.raises(UserError, match=r"safetensors: .*tensor lm_head\.weight (differs|has)"):
            hf_format.open_checkpoint(tmp_path)


@pytest.mark.parametrize("architecture", [TIED, LEARNED], ids=["llama", "gpt2"])
def test_a_tied_model_may_be_stored_as_its_output_layer(
    tmp_path: Path, architecture: Architecture
) -> None:
    """As safetensors' `save_model` stores it: one of the names of tied tensors."""
    model = reference(architecture)
    model.save_pretrained(tmp_path)
    expected = hf_folder.read(tmp_path)[1]
    save_model(model, str(tmp_path / "model.safetensors"))
    names = [*load_file(tmp_path / "model.safetensors")]
    assert "lm_head.weight" in names
    assert not any("embed_tokens" in name or "wte" in name for name in names)
    check(hf_format.open_checkpoint(tmp_path), expected)


@pytest.mark.parametrize("architecture", [PLAIN, LEARNED, MQA], ids=["llama", "gpt2", "bigcode"])
def test_large_models_are_written_in_shards(tmp_path: Path, architecture: Architecture) -> None:
    from transformers import AutoModelForCausalLM

    model = reference(architecture)
    model.save_pretrained(tmp_path / "theirs")
    opened = hf_format.open_checkpoint(tmp_path / "theirs")
    write(tmp_path / "ours", opened, Target(max_shard_bytes=SHARD))
    shards = sorted(file.name for file in (tmp_path / "ours").glob("*.safetensors"))
    assert shards == [
        f"model-{n + 1:05}-of-{len(shards):05}.safetensors" for n in range(len(shards))
    ]
    assert len(shards) > 3
    total = 0
    for name in shards:
        own = load_file(tmp_path / "ours" / name)
        size = sum(tensor.nbytes for tensor in own.values())
        assert size <= SHARD or len(own) == 1
        total += size
    index = json.loads((tmp_path / "ours/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == total
    check(hf_format.open_checkpoint(tmp_path / "ours"), hf_folder.read(tmp_path / "theirs")[1])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype="auto")
    assert torch.equal(logits(loaded), logits(model))
    write(tmp_path / "one", opened, Target(max_shard_bytes=total))
    assert [*(tmp_path / "one").glob("*.safetensors")] == [tmp_path / "one/model.safetensors"]
    write(tmp_path / "again", opened, Target(max_shard_bytes=SHARD))
    for file in (tmp_path / "ours").iterdir():
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes()


@pytest.mark.parametrize(
    ("source", "dtype", "name"),
    [
        (torch.float32, "bf16", "bfloat16"),
        (torch.float32, "fp16", "float16"),
        (torch.bfloat16, "fp32", "float32"),
        (torch.float16, None, "float16"),
        (torch.bfloat16, None, "bfloat16"),
    ],
)
@pytest.mark.parametrize("architecture", [PLAIN, LEARNED, MQA], ids=["llama", "gpt2", "bigcode"])
def test_dtype_is_kept_unless_another_is_requested(
    tmp_path: Path, architecture: Architecture, source: torch.dtype, dtype: str | None, name: str
) -> None:
    from transformers import AutoModelForCausalLM

    model, expected = reference(architecture, source), getattr(torch, name)
    model.save_pretrained(tmp_path / "theirs")
    write(tmp_path / "ours", hf_format.open_checkpoint(tmp_path / "theirs"), Target(dtype=dtype))
    written = load_file(tmp_path / "ours/model.safetensors")
    for key, tensor in gpts.tensors_of(model).items():
        assert written[key].dtype == expected
        assert torch.equal(written[key], tensor.to(expected))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype="auto")
    assert loaded.dtype == expected


def test_several_dtypes_in_one_checkpoint_are_kept(tmp_path: Path) -> None:
    hf_folder.write(tmp_path / "a", PLAIN, random_tensors(PLAIN, 1))
    file = tmp_path / "a/model.safetensors"
    tensors = {
        name: each.bfloat16() if "proj" in name else each.half() if "norm" in name else each
        for name, each in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})
    extents = write(tmp_path / "b", hf_format.open_checkpoint(tmp_path / "a"))
    assert all(extent.offset % extent.dtype.itemsize == 0 for extent in extents)
    assert (tmp_path / "b/model.safetensors").read_bytes() == file.read_bytes()
    assert json.loads((tmp_path / "b/config.json").read_text())["torch_dtype"] == "float32"


@pytest.mark.parametrize("eos_token", [None, 5, [5, 6]])
def test_end_of_text_tokens_are_carried_over(tmp_path: Path, eos_token: Any) -> None:
    from transformers import AutoConfig, GenerationConfig

    hf_folder.write(tmp_path / "a", PLAIN, random_tensors(PLAIN, 1))
    opened = hf_format.open_checkpoint(tmp_path / "a")
    write(tmp_path / "b", replace(opened, notes={"eos_token_id": eos_token}))
    assert hf_format.open_checkpoint(tmp_path / "b").notes["eos_token_id"] == eos_token
    assert AutoConfig.from_pretrained(tmp_path / "b").eos_token_id == eos_token
    assert GenerationConfig.from_pretrained(tmp_path / "b").eos_token_id == eos_token


def test_models_that_transformers_lacks_are_refused(tmp_path: Path) -> None:
    hf_folder.write(tmp_path / "a", LEARNED, random_tensors(LEARNED, 1))
    opened = replace(
        hf_format.open_checkpoint(tmp_path / "a"), architecture=gpts.gpt(num_key_value_heads=2)
    )
    with pytest.raises(UserError, match="transformers has no model type for such a gpt"):
        hf_format.lay_out(tmp_path, opened, target=Target())


def test_other_folders_are_not_of_this_format(tmp_path: Path) -> None:
    assert hf_format.find(tmp_path / "none") is None
    assert hf_format.find(tmp_path) is None
    (tmp_path / "config.json").write_text("{}")
    assert hf_format.find(tmp_path) is None
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    assert hf_format.find(tmp_path) == tmp_path
    (tmp_path / "config.json").unlink()
    assert hf_format.find(tmp_path) is None


RATES = {"hidden": 0.1, "attention": 0.2, "embedding": 0.3}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama", {"attention_dropout": 0.2}),
        ("gpt2", {"attn_pdrop": 0.2, "embd_pdrop": 0.3, "resid_pdrop": 0.1}),
        ("gpt_bigcode", {"attn_pdrop": 0.2, "embd_pdrop": 0.3, "resid_pdrop": 0.1}),
        ("bloom", {"attention_dropout": 0.2, "hidden_dropout": 0.1}),
    ],
)
def test_transformers_reads_the_dropout_of_the_training(
    tmp_path: Path, name: str, expected: dict[str, float]
) -> None:
    config_json.write_config(
        tmp_path, FAMILIES[name], dtype=torch.float32, eos_token=0, notes={"dropout": RATES}
    )
    config = AutoConfig.from_pretrained(tmp_path)
    assert {key: getattr(config, key) for key in expected} == expected
