"""Experts of gpt-oss: interleaved columns, and MXFP4 as transformers dequantizes it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support import dense, hf_folder
from tests.support.random_tensors import random_tensors
from tokamake.checkpoint import writer
from tokamake.checkpoint.detect import open_any
from tokamake.checkpoint.tensors.checkpoint import Target
from tokamake.errors import UserError

SHAPE = dense.oss(hidden_size=64, intermediate_size=96, num_hidden_layers=2)
EXPERTS = "model.layers.{}.mlp.experts."
Tensors = dict[str, Tensor]


def quantized(folder: Path) -> Tensors:
    """Turn a folder into a published one; return its tensors before, experts dequantized.

    transformers' own function is the reference.
    """
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    hf_folder.write(folder, SHAPE, random_tensors(SHAPE, 1))
    file, generator = folder / "model.safetensors", torch.Generator().manual_seed(3)
    tensors = {name: each.bfloat16() for name, each in load_file(file).items()}
    plain = dict(tensors)
    for layer in range(SHAPE.num_hidden_layers):
        for name in ("gate_up_proj", "down_proj"):
            experts, inputs, outputs = tensors.pop(full := EXPERTS.format(layer) + name).shape
            size = experts, outputs, inputs // 32
            blocks = torch.randint(256, (*size, 16), generator=generator).byte()
            scales = torch.randint(255, size, generator=generator).byte()
            tensors |= {f"{full}_blocks": blocks, f"{full}_scales": scales}
            plain[full] = convert_moe_packed_tensors(blocks, scales).contiguous()
    save_file(tensors, file)
    config = json.loads((folder / "config.json").read_text())
    config |= {"quantization_config": {"quant_method": "mxfp4"}, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    return plain


def test_mxfp4_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    expected = quantized(tmp_path / "theirs")
    writer.write(tmp_path / "native", open_any(tmp_path / "theirs"), "native", Target())
    writer.write(tmp_path / "ours", open_any(tmp_path / "native"), "hf", Target())
    ours = load_file(tmp_path / "ours/model.safetensors")
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(ours[name].view(torch.int16), tensor.view(torch.int16)), name
    assert "quantization_config" not in json.loads((tmp_path / "ours/config.json").read_text())


def test_slices_are_computed_alone(tmp_path: Path) -> None:
    quantized(tmp_path)
    source = open_any(tmp_path).source
    for name in ("gate_proj", "up_proj", "down_proj"):
        key = f"model.{EXPERTS.format(1)}{name}.weight"
        whole = source.read(key)
        assert whole.shape == (7, *((64, 96) if name == "down_proj" else (96, 64)))
        part = (slice(2, 5), slice(3, 50), slice(37, 61))
        raw = source.values(key, part).tobytes()
        assert raw == whole[part].contiguous().view(torch.uint8).numpy().tobytes()


def test_numbers_with_a_scale_of_255_are_nan(tmp_path: Path) -> None:
    """So say OCP's Microscaling Formats 1.0, section 5.4.1."""
    quantized(tmp_path)
    tensors = load_file(file := tmp_path / "model.safetensors")
    tensors[EXPERTS.format(0) + "down_proj_scales"][2, 5, 1] = 255
    save_file(tensors, file)
    read = open_any(tmp_path).source.read(f"model.{EXPERTS.format(0)}down_proj.weight")
    expected = torch.zeros_like(read, dtype=torch.bool)
    expected[2, 5, 32:64] = True
    assert torch.equal(read.isnan(), expected)


def drop(name: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.pop(EXPERTS.format(0) + name)


def norm_in_blocks(tensors: Tensors) -> None:
    values = tensors.pop("model.norm.weight")
    for end in ("_blocks", "_scales"):
        tensors["model.norm.weight" + end] = torch.zeros(values.shape, dtype=torch.uint8)


def replace(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], Any]:
    full = EXPERTS.format(0) + name
    return lambda tensors: tensors.update({full: change(tensors[full]).contiguous()})


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (drop("down_proj_scales"), r"experts.down_proj_scales is missing; fetch it again"),
        (drop("down_proj_blocks"), r"experts.down_proj_blocks is missing; fetch it again"),
        (drop("gate_up_proj_bias"), r"gate_up_proj_bias is missing"),
        (replace("down_proj_blocks", lambda x: x[:, :-1]), r"has shape \[7, 63, 3, 16\], the arch"),
        (replace("down_proj_scales", lambda x: x.short()), r"is no MXFP4: it needs contiguous uin"),
        (norm_in_blocks, r"model\.norm\.weight"),
    ],
)
def test_damaged_blocks_are_refused(
    edit: Callable[[Tensors], Any], message: str, tmp_path: Path
) -> None:
    quantized(tmp_path)
    hf_folder.edited(edit)(tmp_path)
    with pytest.raises(UserError, match=message):
        open_any(tmp_path)


@pytest.mark.parametrize("quantization", [{"quant_method": "fp8"}, "mxfp4", [1], True])
def test_other_quantizations_are_refused(quantization: Any, tmp_path: Path) -> None:
    quantized(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] = quantization
    file.write_text(json.dumps(config))
    with pytest.raises(UserError, match="quantization_config: the folder holds quantized weights"):
        open_any(tmp_path)


def test_a_config_without_scaling_has_none_for_transformers_4(tmp_path: Path) -> None:
    """Without the key, transformers 4 stretches positions."""
    shape = SHAPE.model_copy(update={"rope_scaling": None})
    hf_folder.write(tmp_path, shape, random_tensors(shape, 1))
    assert json.loads((tmp_path / "config.json").read_text())["rope_scaling"] is None
    assert open_any(tmp_path).architecture.rope_scaling is None


def test_a_config_without_positions_has_those_of_transformers(tmp_path: Path) -> None:
    hf_folder.write(tmp_path, SHAPE, random_tensors(SHAPE, 1))
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    for name in ("rope_parameters", "rope_theta", "swiglu_alpha"):
        del config[name]
    file.write_text(json.dumps(config))
    architecture = open_any(tmp_path).architecture
    assert architecture.rope_theta == 150000.0
    scaling = architecture.rope_scaling
    assert scaling is not None
    assert (scaling.rope_type, scaling.factor, scaling.truncate) == ("yarn", 32.0, False)
    assert architecture.setting("swiglu_alpha") == 1.702
