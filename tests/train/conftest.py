"""Fixture of the tests of training."""

from pathlib import Path

import pytest

from tests.support.runs import prepare


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a dataset, an index and an initial checkpoint, for the runs of a test file."""
    return prepare(tmp_path_factory.mktemp("train"))
