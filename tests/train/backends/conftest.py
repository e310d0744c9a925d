"""Fixture of the tests of back ends."""

from pathlib import Path

import pytest

from tests.support.proofs import make_runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run.yaml for each initial checkpoint."""
    return make_runs(tmp_path_factory.mktemp("layouts"))
