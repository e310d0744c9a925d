"""A native checkpoint of a short run."""

import shutil
from pathlib import Path

import pytest

from tests.support.runs import make_run, prepare, train_here
from tokamake.config.resolved_run import read_run

SAVED = "global_step2"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a run of two steps."""
    folder = prepare(tmp_path_factory.mktemp("native"))
    assert train_here(make_run(folder, "run", train_steps=2)) == 0
    return folder


@pytest.fixture(scope="module")
def saved(root: Path) -> Path:
    """Its checkpoint; do not write there."""
    return read_run(root / "run/run.yaml").output / SAVED


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    """A copy of it to write in."""
    return Path(shutil.copytree(saved, tmp_path / "training" / SAVED))
