"""Checkpoints of one model in several formats."""

import os
from pathlib import Path

import pytest

from tests.support import hf_folder
from tests.support.families import FAMILIES, weights
from tokamake.checkpoint.convert import convert


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip fsync: thousands of files are written, and no power cut is awaited."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of one model in several formats; do not write there."""
    root = tmp_path_factory.mktemp("formats")
    architecture = FAMILIES["llama"]
    hf_folder.write(root / "hf", architecture, weights(architecture))
    convert(source=root / "hf", target=root / "mds", format="mds", tensor_parallel_size=2)
    convert(
        source=root / "hf", target=root / "pipe", format="mds-pipeline", pipeline_parallel_size=2
    )
    convert(source=root / "hf", target=root / "megatron", format="megatron", tensor_parallel_size=2)
    convert(source=root / "hf", target=root / "stages", format="megatron", pipeline_parallel_size=2)
    return root
