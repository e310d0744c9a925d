"""Folders that the workflow writes are checked before it starts."""

import os
from pathlib import Path

import pytest

from tokamake.errors import UserError
from tokamake.workflow.paths import check_writable


def test_folders_that_can_be_made_are_fine(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "link").symlink_to("scratch")
    check_writable([str(tmp_path / "new/data"), str(tmp_path / "link/data")])
    assert not (tmp_path / "new").exists()


def test_a_folder_without_permission_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    with pytest.raises(UserError, match="cannot be written; change its permissions"):
        check_writable([str(tmp_path / "new/data")])
