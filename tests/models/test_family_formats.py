"""Every format that has a family's model keeps it: bits, config.json, logits of transformers."""

from pathlib import Path
from typing import Any

import pytest

from tests.support import berts, hf_folder, qwens, t5s
from tests.support.random_tensors import random_tensors
from tokamake.checkpoint import writer
from tokamake.checkpoint.convert import convert
from tokamake.checkpoint.detect import open_any
from tokamake.checkpoint.tensors.checkpoint import ParallelLayout, Target

SHAPES = {
    "bert": berts.ARCHITECTURES["bert"],
    "t5": t5s.ARCHITECTURES["t5"],
    "hf_t5": t5s.HF_ARCHITECTURES["hf_t5"],
    "qwen3": qwens.ARCHITECTURES["qwen3"],
}
WHOLE = {"torch_dist": ParallelLayout(), "universal": ParallelLayout(), "native": ParallelLayout()}
LAYOUTS = {
    "bert": {"mds": ParallelLayout(2), "megatron": ParallelLayout(2, 3), **WHOLE},
    "t5": {"mds": ParallelLayout(2), "megatron": ParallelLayout(2), **WHOLE},
    "hf_t5": {"native": ParallelLayout()},
    "qwen3": {
        "mds": ParallelLayout(2),
        "mds_pipeline": ParallelLayout(2, 3),
        "megatron": ParallelLayout(2, 3),
        **WHOLE,
    },
}
CONVERTED: dict[str, dict[str, Any]] = {
    "bert": {"format": "megatron", "tensor_parallel_size": 2},
    "t5": {"format": "megatron", "tensor_parallel_size": 2},
    "hf_t5": {"format": "native"},
}


def write_hf(folder: Path, family: str) -> Path:
    hf_folder.write(folder / "hf", SHAPES[family], random_tensors(SHAPES[family], 1))
    return folder / "hf"


@pytest.mark.parametrize(
    ("family", "kind"), [(family, kind) for family in SHAPES for kind in LAYOUTS[family]]
)
def test_every_format_keeps_every_bit(family: str, kind: str, tmp_path: Path) -> None:
    source = write_hf(tmp_path, family)
    writer.write(tmp_path / "there", open_any(source), kind, Target(LAYOUTS[family][kind]))
    checkpoint = open_any(tmp_path / "there")
    assert checkpoint.architecture == SHAPES[family]
    writer.write(tmp_path / "back", checkpoint, "hf", Target())
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (source / name).read_bytes()


@pytest.mark.parametrize("family", CONVERTED)
def test_transformers_computes_the_logits_of_a_converted_model(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convert(source=write_hf(tmp_path, family), target=tmp_path / "there", **CONVERTED[family])
    convert(source=tmp_path / "there", target=tmp_path / "back", format="hf", compare_logits=True)
    assert "logits: as those of the source, by transformers" in capsys.readouterr().out
