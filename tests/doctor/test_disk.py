"""Checks of disks: space, speed, locks and permissions."""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.doctor.conftest import states
from tokamake.doctor import disk
from tokamake.doctor.result import Result


@pytest.mark.parametrize(
    ("free", "files", "all_files", "state"),
    [
        (1e12, 10**7, 10**8, "ok"),
        (1e12, 0, 0, "ok"),  # file systems that report no limit
        (5e9, 10**7, 10**8, "warning"),
        (1e12, 5_000, 10**8, "warning"),
        (5e8, 10**7, 10**8, "wrong"),
        (1e12, 10, 10**8, "wrong"),
    ],
)
def test_space_on_a_disk(free: float, files: int, all_files: int, state: str) -> None:
    assert disk.free_result("disk", int(free), files=files, all_files=all_files).state == state


def test_measuring_a_disk_leaves_no_files(tmp_path: Path) -> None:
    results = disk.check_disks(tmp_path / "new", [tmp_path], cluster=False)
    assert len(results) == 3  # results and data are on the same disk
    assert states(results)[f"disk of {tmp_path}/new/results, flock"] == "ok"
    assert list(tmp_path.iterdir()) == []


def test_slow_disks_and_disks_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, slow = disk.Speed(1e8, 1e9, ""), disk.Speed(1e6, 1e9, "")
    assert [result.state for result in disk.speed_results("disk", good)] == ["ok", "ok"]
    assert [result.state for result in disk.speed_results("disk", slow)] == ["warning", "ok"]

    def refuse(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(disk.fcntl, "flock", refuse)
    result = disk.check_disk("disk", tmp_path, writes=True)[-1]
    assert result.state == "warning"
    assert "mount option flock" in result.remedy
    monkeypatch.setattr(disk.os, "fsync", refuse)
    assert disk.check_disk("disk", tmp_path, writes=True)[-1].state == "wrong"
    assert list(tmp_path.iterdir()) == []


def test_data_may_be_read_only_and_must_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    missing = disk.check_disks(tmp_path, [tmp_path / "none"], cluster=False)
    assert missing[-1].line.startswith(f"wrong    disk of {tmp_path}/none: no such folder")
    monkeypatch.setattr(disk.tempfile, "NamedTemporaryFile", refuse)
    assert disk.check_disk("disk", tmp_path, writes=False)[-1].state == "ok"
    assert disk.check_disk("disk", tmp_path, writes=True)[-1].state == "wrong"


def test_a_folder_without_permission_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.stat

    def refuse(path: object, **options: Any) -> os.stat_result:
        if str(path).startswith(f"{tmp_path}/theirs/"):
            raise PermissionError(13, "Permission denied")
        return real(path, **options)  # type: ignore[arg-type]

    (tmp_path / "theirs").mkdir()
    monkeypatch.setattr(os, "stat", refuse)
    results = disk.check_disks(tmp_path, [tmp_path / "theirs/raw"], cluster=False)
    assert "theirs/raw: no such folder, or no permission" in results[-1].line


def test_results_in_a_home_get_a_warning_on_clusters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, project = tmp_path / "home/me", tmp_path / "project"
    (home / "work").mkdir(parents=True)
    project.mkdir()
    (project / "link").symlink_to(home)
    (tmp_path / "homes").symlink_to(tmp_path / "home")

    def checked(directory: Path, own: Path = home) -> Result | None:
        monkeypatch.setenv("HOME", str(own))
        result = disk.check_disks(directory, [], cluster=True)[-1]
        return result if result.name == "place" else None

    for inside in (home, home / "work", home / "new/folder", project / "link/work"):
        assert (result := checked(inside)) is not None
        assert (result.state, result.value) == ("warning", f"{inside.resolve()} is in your home")
    assert checked(home / "work", tmp_path / "homes/me")
    # All of these lie on one file system, as on a machine with one disk.
    for elsewhere in (project, home.parent, tmp_path / "home/me2"):
        assert checked(elsewhere) is None
    assert checked(project, tmp_path / "no-home") is None
    monkeypatch.setenv("HOME", str(home))
    assert "place" not in states(disk.check_disks(home, [], cluster=False))
