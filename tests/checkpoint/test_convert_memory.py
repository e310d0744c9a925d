"""Conversion needs at most twice the bytes of the largest tensor, and a constant."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support import hf_folder
from tests.support.peak_memory import peak_of
from tokamake.checkpoint import model_tensors
from tokamake.config.architecture import Architecture

CONSTANT = 64 * 2**20
"""Bytes beyond twice the largest tensor: what is put together at once by two threads."""
SMALL: dict[str, Any] = {
    "vocab_size": 130,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32,
}
MODELS = {
    # Rows that no number of ranks divides, so that they are padded.
    "llama": SMALL | {"vocab_size": 2**16 + 1, "hidden_size": 1024},
    # Tensors that Hugging Face keeps transposed.
    "gpt": SMALL | {"family": "gpt", "hidden_size": 1024, "intermediate_size": 2**16},
}
LARGEST = {"llama": 2 * (2**16 + 1) * 1024, "gpt": 2 * 2**16 * 1024}
LARGEST["strided"] = LARGEST["llama"]
"""Bytes of the largest tensors in bf16; all models have two of them."""


def write(folder: Path, architecture: Architecture) -> Path:
    """A checkpoint in bf16 of which hardly two rows are alike."""
    tensors = {
        name: (torch.arange(torch.Size(shape).numel()) % 8191 / 4096 - 1).bfloat16().view(shape)
        for name, shape in model_tensors.shapes(architecture).items()
    }
    hf_folder.write(folder, architecture, tensors)
    return folder


def turn(folder: Path, target: Path) -> Path:
    """The same checkpoint, of which torch.save has saved matrices as transposed views."""
    target.mkdir(parents=True)
    tensors = {
        name: each.t().contiguous().t() if each.dim() > 1 else each
        for name, each in load_file(folder / "model.safetensors").items()
    }
    torch.save(tensors, target / "pytorch_model.bin")
    shutil.copyfile(folder / "config.json", target / "config.json")
    return target


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large and small checkpoints of both families; what is made of them goes beside."""
    folder = tmp_path_factory.mktemp("memory")
    for name, large in MODELS.items():
        small = SMALL | ({"family": "gpt"} if name == "gpt" else {})
        for size, shape in (("large", large), ("small", small)):
            write(folder / size / name, Architecture(**shape))
    for size in ("large", "small"):
        turn(folder / size / "llama", folder / size / "strided")
    return folder


def peak(source: Path, target: Path, *options: str) -> int:
    """Largest resident set of a conversion, in bytes; pages of mapped files are a part of it."""
    return peak_of("convert", f"--from={source}", f"--to={target}", *options)


WAYS: dict[str, tuple[str, float, list[list[str]]]] = {
    # model, bytes of the largest tensor over those in bf16, conversions one after the other
    "padded over ranks, and back": (
        "llama",
        1,
        [["--format=mds", "--tensor-parallel-size=2"], ["--format=hf"]],
    ),
    "padded in fp32": ("llama", 2, [["--format=mds-pipeline", "--dtype=fp32"]]),
    "to fp16 and to bf16": (
        "llama",
        1,
        [["--format=hf", "--dtype=fp16"], ["--format=native", "--dtype=bf16"]],
    ),
    "all in fp32": ("llama", 2, [["--format=universal"], ["--format=megatron", "--dtype=bf16"]]),
    "transposed over ranks, and back": (
        "gpt",
        1,
        [["--format=megatron", "--tensor-parallel-size=2"], ["--format=hf"]],
    ),
    "strided in the file, padded over ranks": (
        "strided",
        1,
        [["--format=mds", "--tensor-parallel-size=4"]],
    ),
    "strided in the file, rounded": ("strided", 1, [["--format=megatron", "--dtype=fp16"]]),
    "transposed, and in another format": ("gpt", 2, [["--format=hf", "--dtype=fp32"]]),
}


@pytest.mark.grid
@pytest.mark.parametrize("way", WAYS)
def test_memory_stays_below_twice_the_largest_tensor(way: str, root: Path, tmp_path: Path) -> None:
    model, factor, conversions = WAYS[way]
    small, large = (root / size / model for size in ("small", "large"))
    for number, options in enumerate(conversions):
        targets = [tmp_path / f"{size}-{number}" for size in ("small", "large")]
        base, most = (
            peak(source, target, "--workers=2", *options)
            for source, target in zip((small, large), targets, strict=True)
        )
        assert most - base <= 2 * factor * LARGEST[model] + CONSTANT, f"{options}: {most - base:,}"
        small, large = targets


@pytest.mark.grid
@pytest.mark.parametrize("model", MODELS)
def test_inspecting_values_needs_little_memory(model: str, root: Path) -> None:
    base, most = (
        peak_of("inspect", str(root / size / model), "--values") for size in ("small", "large")
    )
    assert most - base <= CONSTANT, f"{most - base:,}"
