"""A folder of Hugging Face of the module's `SHAPE`."""

import os
from pathlib import Path

import pytest

from tests.support import hf_folder
from tests.support.random_tensors import random_tensors


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip fsync: no power cut is awaited."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture
def config(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """config.json of the folder."""
    hf_folder.write(tmp_path / "hf", shape := request.module.SHAPE, random_tensors(shape, 1))
    return tmp_path / "hf/config.json"
