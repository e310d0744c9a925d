"""Fixtures of the workflow's tests."""

from pathlib import Path

import pytest

from tests.support.workflows import make_workspace


@pytest.fixture
def workspace_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder, which is the current one."""
    monkeypatch.chdir(make_workspace(tmp_path))
    return tmp_path
