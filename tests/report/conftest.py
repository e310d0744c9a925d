"""Fixtures of the tests of reports."""

from pathlib import Path

import pytest

from tests.support.finished_run import make_results


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A results folder with one finished run."""
    return make_results(tmp_path / "results")
