"""Damaged Hugging Face folders are refused, and no code in them runs."""

import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import llamas
from tests.support.hf_folder import SHARD, edited, pickled, reference
from tokamake.checkpoint.hf import format as hf_format
from tokamake.errors import UserError

PLAIN = llamas.ARCHITECTURES[5]


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


def _config(**values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

    return change


def _index(content: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "a.safetensors")
        (folder / "model.safetensors.index.json").write_text(content)

    return change


def _truncated_shard(folder: Path) -> None:
    _index('{"weight_map": {"model.norm.weight": "a.safetensors"}}')(folder)
    (folder / "a.safetensors").write_bytes(b"123")


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
_OUTSIDE = r"index\.json: weight_map: .* is not a file of the folder; fetch"
DAMAGED = r"model\.safetensors: damaged \(.*\); fetch or export the checkpoint again$"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (shutil.rmtree, r"config\.json: no such file; fetch or export"),
        (lambda f: (f / "config.json").write_text("[]"), r"config\.json: model_type: None"),
        (lambda f: (f / "config.json").write_text("{"), r"config\.json: not valid JSON"),
        (lambda f: (f / "config.json").write_text("[" * 200_000), r"config\.json: not valid JSON"),
        (lambda f: (f / "config.json").write_text("9" * 5000), r"config\.json: not valid JSON"),
        (_config(num_hidden_layers=30_000_000), r"config\.json: num_hidden_layers: .*10000"),
        (
            lambda f: (f / "model.safetensors").unlink(),
            r"neither model\.safetensors nor .*; fetch or export",
        ),
        (_bytes(lambda content: content[:-1000]), DAMAGED),
        (_bytes(lambda content: content + b"1"), DAMAGED),
        (_bytes(lambda content: content[:100]), DAMAGED),
        (_bytes(lambda _: b""), DAMAGED),
        (_bytes(lambda _: b"123"), DAMAGED),
        (_truncated_shard, r"a\.safetensors: damaged"),
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
        (
            _header(lambda h: h[NORM].update(dtype="I32")),
            r"norm\.weight is torch\.int32; save weights",
        ),
        (edited(lambda t: t.pop(NORM)), r"tensor model\.norm\.weight is missing; fetch"),
        (edited(lambda t: t.update(x=torch.ones(1))), r"tensor x is not part of the model; fetch"),
        (
            edited(lambda t: t.update({NORM: torch.ones(65)})),
            r"model\.safetensors: tensor model\.norm\.weight has shape \[65\], .* for \[64\]",
        ),
        (
            edited(lambda t: [t.pop(key) for key in list(t) if "layers.2" in key]),
            r"tensor model\.layers\.2\.input_layernorm\.weight \(and 8 more\) is missing",
        ),
        (
            edited(lambda t: t.update({"wte.weight": t.pop("model.embed_tokens.weight")})),
            r"tensor model\.embed_tokens\.weight is missing, and tensor wte\.weight is not part of",
        ),
        (
            edited(lambda t: t.update({f"{NORM}.quant_state.bitsandbytes__nf4": torch.ones(1)})),
            r"tensor model\.norm\.weight\.quant_state\.bitsandbytes__nf4 belongs to quantized weig",
        ),
        (
            edited(lambda t: t.update({"model.norm.qweight": t.pop(NORM)})),
            r"tensor model\.norm\.qweight belongs to quantized weights; dequantize",
        ),
        (
            edited(lambda t: t.update({"model.norm.lora_A.weight": torch.ones(1)})),
            r"norm\.lora_A\.weight belongs to a LoRA adapter \(PEFT\), no whole model; merge",
        ),
        (
            lambda f: (f / "adapter_config.json").write_text("{}"),
            r"adapter_config\.json is a LoRA adapter \(PEFT\), no whole model; merge it into",
        ),
        (_index("{"), r"index\.json: not valid JSON"),
        (_index("{}"), r"index\.json: no weight_map"),
        (_index('{"weight_map": {"x": "b.safetensors"}}'), r"b\.safetensors: no such file; fetch"),
        (_index('{"weight_map": {"x": "a.safetensors"}}'), r"a\.safetensors: tensor x is missing"),
        (_index('{"weight_map": {"x": "../../secret"}}'), _OUTSIDE),
        (_index('{"weight_map": {"x": "/etc/a.safetensors"}}'), _OUTSIDE),
        (_index('{"weight_map": {"x": ".."}}'), _OUTSIDE),
        (_index('{"weight_map": {"x": 1}}'), _OUTSIDE),
        (_bin([torch.ones(1)]), r"pytorch_model\.bin: holds no tensors by name; fetch"),
        (_bin({"x": 1}), r"pytorch_model\.bin: x is not a tensor; fetch"),
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
    file, marker = tmp_path / "pytorch_model.bin", tmp_path / "made"
    content = {"model.norm.weight": torch.ones(64), "x": _Hostile(marker)}
    if in_zip:
        torch.save(content, file)
    else:
        file.write_bytes(pickle.dumps(_Hostile(marker)))
    with pytest.raises(UserError, match=r"pytorch_model\.bin: .*; fetch or export the checkpoint"):
        hf_format.open_checkpoint(tmp_path)
    assert not marker.exists()
    torch.load(file, weights_only=False) if in_zip else pickle.loads(file.read_bytes())
    assert marker.exists()  # it would have run
