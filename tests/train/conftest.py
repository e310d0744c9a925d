"""Fixtures of the tests of training."""

from pathlib import Path

import pytest

from tests.support.runs import make_run, prepare, train_here


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a dataset, an index and an initial checkpoint, for the runs of a test file."""
    return prepare(tmp_path_factory.mktemp("train"))


@pytest.fixture(scope="module")
def single(root: Path, lone_rank: None) -> Path:
    """A finished run of one process; do not write here."""
    config = make_run(root, "single")
    assert train_here(config) == 0
    return config
