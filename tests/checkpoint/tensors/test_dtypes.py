"""Dtypes of tensors in conversions: kept, requested, mixed."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import hf_folder
from tests.support.families import FAMILIES, weights
from tokamake.checkpoint.convert import convert
from tokamake.checkpoint.detect import open_any
from tokamake.checkpoint.tensors.chunks import check_replicas
from tokamake.errors import UserError


def test_dtypes_of_every_conversion(tmp_path: Path) -> None:
    architecture = FAMILIES["llama-gqa"]
    exact = weights(architecture, torch.float32)
    hf_folder.write(tmp_path / "hf", architecture, exact)
    convert(source=tmp_path / "hf", target=tmp_path / "a", format="mds-pipeline", dtype="bf16")
    converted = open_any(tmp_path / "a").source
    for name, tensor in exact.items():
        assert torch.equal(converted.read(f"model.{name}"), tensor.bfloat16())


def test_mixed_dtypes_are_kept_or_widened(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    architecture = FAMILIES["llama"]
    hf_folder.write(tmp_path / "hf", architecture, weights(architecture))
    file = tmp_path / "hf" / "model.safetensors"
    mixed = load_file(file)
    key = "model.layers.0.self_attn.k_proj.weight"
    mixed[key] = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    save_file(mixed, file, metadata={"format": "pt"})
    convert(source=tmp_path / "hf", target=tmp_path / "a", format="mds")
    converted = open_any(tmp_path / "a").source
    assert torch.equal(converted.read(f"model.{key}"), mixed[key])
    query = f"model.{key.replace('k_proj', 'q_proj')}"
    assert converted.dtype(query).torch == torch.float32
    assert converted.dtype("model.model.norm.weight").torch == torch.bfloat16


@pytest.mark.parametrize(
    ("dtype", "number", "wider"), [("fp16", 1e6, "bf16 or fp32"), ("bf16", 3.4e38, "fp32")]
)
def test_numbers_beyond_the_range_of_a_dtype_are_refused(
    dtype: Any, number: float, wider: str, tmp_path: Path
) -> None:
    architecture = FAMILIES["gpt2"]
    known = weights(architecture, torch.float32)
    known["model.norm.bias"][3] = number
    hf_folder.write(tmp_path / "hf", architecture, known)
    match = rf"model\.norm\.bias: has numbers beyond {dtype}'s range; use --dtype {wider}$"
    with pytest.raises(UserError, match=match):
        convert(source=tmp_path / "hf", target=tmp_path / "a", format="mds", dtype=dtype)
    assert not (tmp_path / "a").exists()


SECOND = "global_step0/mp_rank_01_model_states.pt"


def of_two_formats(tmp_path: Path, first: torch.dtype, second: torch.dtype) -> Path:
    """A checkpoint whose second rank has other numbers of the layers' projections."""
    architecture = FAMILIES["llama-gqa"]
    hf_folder.write(tmp_path / "hf", architecture, weights(architecture, torch.float32))
    for rank, dtype in (("bf16", first), ("fp16", second)):
        short = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
        convert(
            source=tmp_path / "hf",
            target=tmp_path / rank,
            format="mds",
            tensor_parallel_size=2,
            dtype=short,  # type: ignore
        )
    module = torch.load(tmp_path / "fp16" / SECOND, weights_only=False)["module"]
    state = torch.load(tmp_path / "bf16" / SECOND, weights_only=False)
    encoder = state["module"]["language_model"]["encoder"]
    for name, value in module["language_model"]["encoder"].items():
        if "norm" not in name:
            encoder[name] = value
    torch.save(state, tmp_path / "bf16" / SECOND)
    return tmp_path / "bf16"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float16),
    ],
    ids=str,
)
def test_parts_of_a_tensor_in_several_dtypes_get_the_widest(
    first: torch.dtype, second: torch.dtype, tmp_path: Path
) -> None:
    exact = weights(FAMILIES["llama-gqa"], torch.float32)
    folder = of_two_formats(tmp_path, first, second)
    convert(source=folder, target=tmp_path / "back", format="hf")
    source, back = open_any(folder).source, open_any(tmp_path / "back").source
    check_replicas(source)
    key = "model.layers.1.self_attn.q_proj.weight"
    half = len(exact[key]) // 2
    expected = torch.cat(
        [exact[key][:half].to(first).float(), exact[key][half:].to(second).float()]
    )
    for converted in (source, back):
        assert converted.read(f"model.{key}").dtype == torch.float32
        assert torch.equal(converted.read(f"model.{key}"), expected)
        assert converted.dtype("model.model.norm.weight").torch == first


def test_parts_are_rounded_once_to_a_requested_dtype(tmp_path: Path) -> None:
    exact = weights(FAMILIES["llama-gqa"], torch.float32)
    folder = of_two_formats(tmp_path, torch.float32, torch.bfloat16)
    convert(source=folder, target=tmp_path / "back", format="hf", dtype="bf16")
    converted = open_any(tmp_path / "back").source
    for key, tensor in exact.items():
        assert torch.equal(converted.read(f"model.{key}"), tensor.bfloat16()), key
