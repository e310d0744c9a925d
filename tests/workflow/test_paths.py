"""Folders that the workflow writes are checked before it starts."""

import os
import tempfile
from pathlib import Path

import pytest

from tokamake.errors import UserError
from tokamake.workflow.paths import check_room, check_writable, record_path


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


def test_a_file_or_a_dead_link_in_place_of_a_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("results").touch()
    with pytest.raises(UserError, match=r"^results: a file, but the workflow writes to results/d"):
        check_writable(["results/data"])
    Path("results").unlink()
    Path("results").symlink_to("scratch")
    with pytest.raises(UserError, match=r"^results: a link to scratch, which does not exist; mak"):
        check_writable(["results/data"])


@pytest.mark.fault("full disk")
def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_room(tmp_path)
    assert not list(tmp_path.iterdir())
    full = lambda **_: open("/dev/full", "wb", buffering=0)  # noqa: E731, SIM115
    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(UserError, match="No space left on device; free some space on its disk"):
        check_room(tmp_path)


@pytest.mark.parametrize(
    ("output", "record"),
    [
        ("results/mine/run.yaml", "results/mine/.made_from/run.yaml.json"),
        ("results/mine/index/index.json", "results/mine/.made_from/index/index.json.json"),
        ("results/mine/export", "results/mine/.made_from/export.json"),
        ("results/data/plan.json", "results/data/.made_from/plan.json.json"),
        ("results/data/hashes/a-0.rows", "results/data/.made_from/hashes/a-0.rows.json"),
        ("results/data/set/hashes/a-0.rows", "results/data/set/.made_from/hashes/a-0.rows.json"),
        ("results/data/set/tokenizer/a", "results/data/set/.made_from/tokenizer/a.json"),
        ("results/tokenizer/a", "results/.made_from/tokenizer/a.json"),
        ("results/report.html", "results/.made_from/report.html.json"),
        ("inner/results/mine/run.yaml", "inner/results/mine/.made_from/run.yaml.json"),
        ("weights/a.safetensors", None),
    ],
)
def test_records_are_in_the_folder_that_moves_as_a_whole(output: str, record: str | None) -> None:
    path = record_path(output)
    assert (path and str(path)) == record
