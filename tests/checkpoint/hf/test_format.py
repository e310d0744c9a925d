"""Folders of every model type of transformers are opened, and laid out for transformers."""

import json
import os
import pickle
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support import gpts, llamas
from tokamake.checkpoint.hf import format as hf_format
from tokamake.checkpoint.hf import hf_folder
from tokamake.checkpoint.model_tensors import random
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
SHARD = 20_000
"""Bytes of a shard, so that there are several."""


def reference(architecture: Architecture, dtype: torch.dtype = torch.float32) -> Any:
    family = llamas if architecture.family == "llama" else gpts
    return family.reference(architecture, dtype)


def pickled(folder: Path, *, shards: int = 1) -> None:
    """Turn a folder of transformers' into one of earlier versions."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    if shards == 1:
        torch.save(tensors, folder / "pytorch_model.bin")
        return
    file_of = {
        name: f"pytorch_model-{number % shards + 1:05}-of-{shards:05}.bin"
        for number, name in enumerate(tensors)
    }
    for file in set(file_of.values()):
        own = {name: each for name, each in tensors.items() if file_of[name] == file}
        torch.save(own, folder / file)
    index = {"metadata": {}, "weight_map": file_of}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def check(opened: Checkpoint, expected: dict[str, torch.Tensor]) -> None:
    assert list(opened.source) == [f"model.{name}" for name in expected]
    for name, tensor in expected.items():
        found = opened.source.read(f"model.{name}")
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor), name


def write(folder: Path, opened: Checkpoint, target: Target = Target()) -> list[Extent]:  # noqa: B008
    folder.mkdir()
    regions = hf_format.lay_out(folder, opened, target)
    assert {*fill(regions, opened.source, keys=[*opened.source])} == {*opened.source}
    return regions


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
    hf_folder.write(tmp_path / "a", MODELS[name], random(MODELS[name], 1))
    regions = write(tmp_path / "b", hf_format.open_checkpoint(tmp_path / "a"))
    assert all(region.offset % region.dtype.itemsize == 0 for region in regions)
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
    assert [region.name for region in opened.source.extents if region.is_copy] == ["lm_head.weight"]


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
    gpts.reference(LEARNED, multi_query=False).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "gpt_bigcode"
    opened = hf_format.open_checkpoint(tmp_path)
    assert opened.notes["model_type"] == "gpt_bigcode"
    check(opened, hf_folder.read(tmp_path)[1])


@pytest.mark.parametrize(
    "architecture", [PLAIN, LEARNED, gpts.ALIBI], ids=["llama", "gpt2", "bloom"]
)
def test_names_without_prefix_and_old_buffers_are_read(
    tmp_path: Path, architecture: Architecture
) -> None:
    reference(architecture).save_pretrained(tmp_path)
    expected = hf_folder.read(tmp_path)[1]
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    bare = {n.removeprefix("transformer.").removeprefix("model."): t for n, t in tensors.items()}
    if architecture == LEARNED:
        bare["h.0.attn.bias"] = torch.ones(1, 1, 8, 8, dtype=torch.uint8)
    save_file(bare, file)
    check(hf_format.open_checkpoint(tmp_path), expected)
    save_file({n: t for n, t in bare.items() if n not in ("ln_f.weight", "norm.weight")}, file)
    with pytest.raises(UserError, match=r"tensor \w+\.\w+\.weight is missing"):
        hf_format.open_checkpoint(tmp_path)


def test_a_stored_copy_of_the_tied_output_layer_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "SLAB", 1000)  # many slices and a part of one
    hf_folder.write(tmp_path, TIED, random(TIED, 1))
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    embedding = tensors["model.embed_tokens.weight"]
    expected = hf_folder.read(tmp_path)[1]
    save_file(tensors | {"lm_head.weight": embedding.clone()}, file)
    check(hf_format.open_checkpoint(tmp_path), expected)
    other = embedding.clone()
    other[-1, -1] += 1
    for head in (other, embedding.bfloat16(), embedding[:-1].clone(), embedding[:0].clone()):
        save_file(tensors | {"lm_head.weight": head}, file)
        with pytest.raises(UserError, match=r"safetensors: .*tensor lm_head\.weight (differs|has)"):
            hf_format.open_checkpoint(tmp_path)


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

    model, wanted = reference(architecture, source), getattr(torch, name)
    model.save_pretrained(tmp_path / "theirs")
    write(tmp_path / "ours", hf_format.open_checkpoint(tmp_path / "theirs"), Target(dtype=dtype))
    written = load_file(tmp_path / "ours/model.safetensors")
    for key, tensor in gpts.tensors_of(model).items():
        assert written[key].dtype == wanted
        assert torch.equal(written[key], tensor.to(wanted))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype="auto")
    assert loaded.dtype == wanted


def test_several_dtypes_in_one_checkpoint_are_kept(tmp_path: Path) -> None:
    hf_folder.write(tmp_path / "a", PLAIN, random(PLAIN, 1))
    file = tmp_path / "a/model.safetensors"
    tensors = {
        name: each.bfloat16() if "proj" in name else each.half() if "norm" in name else each
        for name, each in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})
    regions = write(tmp_path / "b", hf_format.open_checkpoint(tmp_path / "a"))
    assert all(region.offset % region.dtype.itemsize == 0 for region in regions)
    assert (tmp_path / "b/model.safetensors").read_bytes() == file.read_bytes()
    assert json.loads((tmp_path / "b/config.json").read_text())["torch_dtype"] == "float32"


@pytest.mark.parametrize("eos_token", [None, 5, [5, 6]])
def test_end_of_text_tokens_are_carried_over(tmp_path: Path, eos_token: Any) -> None:
    from transformers import AutoConfig, GenerationConfig

    hf_folder.write(tmp_path / "a", PLAIN, random(PLAIN, 1))
    opened = hf_format.open_checkpoint(tmp_path / "a")
    write(tmp_path / "b", replace(opened, notes={"eos_token_id": eos_token}))
    assert hf_format.open_checkpoint(tmp_path / "b").notes["eos_token_id"] == eos_token
    assert AutoConfig.from_pretrained(tmp_path / "b").eos_token_id == eos_token
    assert GenerationConfig.from_pretrained(tmp_path / "b").eos_token_id == eos_token


def test_models_that_transformers_lacks_are_refused(tmp_path: Path) -> None:
    hf_folder.write(tmp_path / "a", LEARNED, random(LEARNED, 1))
    opened = replace(
        hf_format.open_checkpoint(tmp_path / "a"), architecture=gpts.gpt(num_key_value_heads=2)
    )
    with pytest.raises(UserError, match="transformers has no model type for such a gpt"):
        hf_format.lay_out(tmp_path, opened, Target())


def test_other_folders_are_not_of_this_format(tmp_path: Path) -> None:
    assert hf_format.find(tmp_path / "none") is None
    assert hf_format.find(tmp_path) is None
    (tmp_path / "config.json").write_text("{}")
    assert hf_format.find(tmp_path) is None
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    assert hf_format.find(tmp_path) == tmp_path
    (tmp_path / "config.json").unlink()
    assert hf_format.find(tmp_path) is None


def _bytes(edit: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(edit(file.read_bytes()))

    return change


def _header(edit: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Change the header alone; tensors stay where they are."""

    def change(content: bytes) -> bytes:
        length = struct.unpack("<Q", content[:8])[0]
        header = json.loads(content[8 : 8 + length])
        header = edit(header) or header
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + content[8 + length :]

    return _bytes(change)


def _save(edit: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "model.safetensors")

    return change


def _index(content: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "a.safetensors")
        (folder / "model.safetensors.index.json").write_text(content)

    return change


def _bin(content: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        torch.save(content, folder / "pytorch_model.bin")

    return change


def _cut_bin(folder: Path) -> None:
    pickled(folder)
    file = folder / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:-1000])


def _lost_bin(folder: Path) -> None:
    pickled(folder, shards=3)
    (folder / "pytorch_model-00002-of-00003.bin").unlink()


def _deep(content: bytes) -> bytes:
    return struct.pack("<Q", 200_000) + b"[" * 200_000 + content


NORM = "model.norm.weight"
DAMAGED = r"model\.safetensors: damaged \(.*\); fetch or export the checkpoint again$"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "config.json").write_text("{"), r"config\.json: not valid JSON"),
        (lambda f: (f / "model.safetensors").unlink(), "neither model.safetensors nor .*; fetch"),
        (_bytes(lambda content: content[:-1000]), DAMAGED),
        (_bytes(lambda content: content + b"1"), DAMAGED),
        (_bytes(lambda content: content[:100]), DAMAGED),
        (_bytes(lambda _: b""), DAMAGED),
        (_bytes(lambda _: b"123"), DAMAGED),
        (_bytes(lambda _: b"garbage " * 100), DAMAGED),
        (_bytes(lambda content: content[:8] + b"x" + content[9:]), DAMAGED),
        (_bytes(lambda content: b"\xff" * 8 + content[8:]), DAMAGED),
        (_bytes(lambda content: content[:20] + b"\xff" + content[21:]), DAMAGED),
        (_bytes(_deep), DAMAGED),
        (_header(lambda _: [1]), DAMAGED),
        (_header(lambda h: h.update({NORM: 1})), DAMAGED),
        (_header(lambda h: h[NORM].pop("shape")), DAMAGED),
        (_header(lambda h: h[NORM].update(shape=None)), DAMAGED),
        (_header(lambda h: h[NORM].update(shape=[-64])), DAMAGED),
        (_header(lambda h: h[NORM].update(shape=[64.0])), DAMAGED),
        (_header(lambda h: h[NORM].update(shape=[2**70])), DAMAGED),
        (_header(lambda h: h[NORM].update(data_offsets=[0, 256])), DAMAGED),
        (_header(lambda h: h[NORM].update(data_offsets=["0", "256"])), DAMAGED),
        (_header(lambda h: h[NORM].update(dtype="F4")), DAMAGED),
        (_header(lambda h: h[NORM].update(dtype="F64")), DAMAGED),
        (_header(lambda h: h[NORM].update(dtype="I32")), r"norm\.weight is torch\.int32; save all"),
        (_save(lambda t: t.pop(NORM)), r"tensor model\.norm\.weight is missing; fetch"),
        (_save(lambda t: t.update(x=torch.ones(1))), r"tensor x is not part of the model; fetch"),
        (
            _save(lambda t: t.update({NORM: torch.ones(65)})),
            r"model\.safetensors: tensor model\.norm\.weight has shape \[65\], .* for \[64\]",
        ),
        (_index("{"), r"index\.json: not valid JSON"),
        (_index("{}"), r"index\.json: no weight_map"),
        (_index('{"weight_map": {"x": "b.safetensors"}}'), r"b\.safetensors: no such file; fetch"),
        (_index('{"weight_map": {"x": "a.safetensors"}}'), r"a\.safetensors: tensor x is missing"),
        (_bin([torch.ones(1)]), r"pytorch_model\.bin: holds no tensors by name; fetch"),
        (_bin({"x": 1}), r"pytorch_model\.bin: x is no tensor; fetch"),
        (_bin({"x": torch.ones(1)}), r"tensor lm_head.weight \(and 29 more\) is missing"),
        (
            _cut_bin,
            r"pytorch_model\.bin: damaged \(.*\), or .*; fetch or export the checkpoint again",
        ),
        (_lost_bin, r"pytorch_model-00002-of-00003\.bin: no such file; fetch"),
    ],
)
def test_broken_folders_are_refused(
    tmp_path: Path, change: Callable[[Path], Any], message: str
) -> None:
    reference(PLAIN).save_pretrained(tmp_path)
    change(tmp_path)
    with pytest.raises(UserError, match=message) as error:
        hf_format.open_checkpoint(tmp_path)
    assert str(error.value).startswith(str(tmp_path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("file", ["model-00002-of-", "model-00001-of-"])
@pytest.mark.parametrize("lost", [True, False], ids=["missing", "truncated"])
def test_broken_shards_are_refused(tmp_path: Path, file: str, lost: bool) -> None:
    reference(PLAIN).save_pretrained(tmp_path, max_shard_size=SHARD)
    shard = next(tmp_path.glob(f"{file}*"))
    if lost:
        shard.unlink()
    else:
        os.truncate(shard, shard.stat().st_size - 1)
    with pytest.raises(UserError, match="no such file" if lost else "damaged") as error:
        hf_format.open_checkpoint(tmp_path)
    assert str(error.value).startswith(f"{shard}: ")


class _Hostile:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.file),)


@pytest.mark.parametrize("in_zip", [True, False])
def test_code_in_a_pickled_file_does_not_run(tmp_path: Path, in_zip: bool) -> None:
    reference(PLAIN).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    file, made = tmp_path / "pytorch_model.bin", tmp_path / "made"
    content = {"model.norm.weight": torch.ones(64), "x": _Hostile(made)}
    if in_zip:
        torch.save(content, file)
    else:
        file.write_bytes(pickle.dumps(_Hostile(made)))
    with pytest.raises(UserError, match=r"pytorch_model\.bin: .*; fetch or export the checkpoint"):
        hf_format.open_checkpoint(tmp_path)
    assert not made.exists()
    torch.load(file, weights_only=False) if in_zip else pickle.loads(file.read_bytes())
    assert made.exists()  # it would have run
