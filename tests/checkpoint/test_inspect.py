"""`inspect` describes a checkpoint, and detects damage."""

import shutil
from pathlib import Path

import pytest
import torch

from tests.support import dense, hf_folder
from tests.support.families import FAMILIES, assert_same, weights
from tests.support.random_tensors import random_tensors
from tests.support.runs import write_start
from tokamake.checkpoint.convert import convert
from tokamake.checkpoint.detect import open_any
from tokamake.checkpoint.inspect import inspect
from tokamake.errors import UserError


def copied(folder: Path, target: Path) -> Path:
    shutil.copytree(folder, target)
    return target


def change(folder: Path, rank: str, name: str, value: float) -> None:
    """Write another number into a tensor of a rank, and write the file and its checksums again."""
    (file,) = folder.rglob(f"{rank}_model_states.pt")
    state = torch.load(file, weights_only=False)
    encoder = state["module"]["language_model"]["encoder"]
    next(tensor for key, tensor in encoder.items() if name in key).view(-1)[3] = value
    torch.save(state, file)


@pytest.mark.parametrize("name", ["mds", "pipe", "megatron", "universal", "native", "trained"])
def test_a_flipped_bit_is_detected(name: str, folder: Path, tmp_path: Path) -> None:
    kept = folder / name
    if name in ("universal", "native"):
        kept = tmp_path / "kept"
        convert(source=folder / "hf", target=kept, format=name)  # type: ignore[arg-type]
    elif name == "trained":
        kept = tmp_path / "kept"
        write_start(kept, FAMILIES["llama"], weights(FAMILIES["llama"]))
    broken = copied(kept, tmp_path / "broken")
    inspect(broken, values=True)
    extent = max(open_any(broken).source.extents, key=lambda each: each.num_bytes)
    with extent.file.open("r+b") as stream:
        stream.seek(extent.offset + extent.num_bytes // 2)
        byte = stream.read(1)[0]
        stream.seek(-1, 1)
        stream.write(bytes([byte ^ 1]))
    for look in (
        lambda: inspect(broken, values=True),
        lambda: convert(source=broken, target=tmp_path / "out", format="hf"),
    ):
        with pytest.raises(UserError, match=r"damaged: the checksum of .* is wrong; fetch"):
            look()
    assert not (tmp_path / "out").exists()


def test_layers_that_predict_further_tokens_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = dense.spread("glm4_moe")
    hf_folder.write(tmp_path / "hf", shape, random_tensors(shape, 1))
    inspect(tmp_path / "hf")
    assert "glm4_moe: 4 layers and 1 MTP layer of 60, MLP 48, 6 heads" in capsys.readouterr().out


def test_inspect_describes_a_checkpoint(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inspect(folder / "pipe", tensors=True, values=True)
    printed = capsys.readouterr().out
    for line in (
        "format        Megatron-DeepSpeed, with pipeline",
        "layout        pipeline 2",
        "vocabulary    131, stored as 256 rows",
        "model.layers.3.self_attn.q_proj.weight  [64, 64]  bfloat16",
        "values        all finite; replicas are equal; checksums hold",
    ):
        assert line in printed
    broken = copied(folder / "mds", tmp_path / "broken")
    change(broken, "mp_rank_01", "post_attention_layernorm", 7.0)
    differs = r"mp_rank_01.*: replicated tensor .*layernorm.* differs .*--take-first-copy"
    with pytest.raises(UserError, match=differs):
        inspect(broken, values=True)
    with pytest.raises(UserError, match=differs):
        convert(source=broken, target=tmp_path / "out", format="hf")
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]
    convert(source=broken, target=tmp_path / "first", format="hf", take_first_copy=True)
    assert_same(open_any(tmp_path / "first"), FAMILIES["llama"])
    change(broken, "mp_rank_00", "dense_h_to_4h", float("nan"))
    with pytest.raises(UserError, match="1 values are NaN or infinite"):
        inspect(broken, values=True)
