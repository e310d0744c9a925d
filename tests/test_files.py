"""Atomic writes: files are complete or absent."""

import subprocess
import sys
from pathlib import Path

import pytest

from tokamake import files
from tokamake.errors import UserError


def test_a_failure_leaves_the_old_file_and_no_temporary(tmp_path: Path) -> None:
    path = tmp_path / "value.json"
    files.write_json(path, {"a": 1})
    with pytest.raises(RuntimeError, match="midway"), files.atomic(path) as (temporary,):
        temporary.write_text("half")
        raise RuntimeError("midway")
    assert files.read_json(path, "") == {"a": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["value.json"]


def test_several_files_appear_together(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    with files.atomic(first, second) as (temporary_first, temporary_second):
        temporary_first.write_text("1")
        temporary_second.write_text("2")
        assert not first.exists()
        assert not second.exists()
    assert (first.read_text(), second.read_text()) == ("1", "2")


def test_a_folder_is_replaced_completely(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    for name in ("old", "new"):
        with files.atomic_folder(path, also=["o*"]) as folder:
            (folder / name).write_text(name)
    assert [entry.name for entry in path.iterdir()] == ["new"]
    with pytest.raises(RuntimeError), files.atomic_folder(path) as folder:
        (folder / "half").write_text("half")
        raise RuntimeError
    assert [entry.name for entry in path.iterdir()] == ["new"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder"]


def test_a_folder_with_other_files_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "models"
    path.mkdir()
    (path / "thesis.txt").write_text("precious")
    with (
        pytest.raises(UserError, match=r"models: holds thesis\.txt, which would be lost"),
        files.atomic_folder(path) as folder,
    ):
        (folder / "new").write_text("new")
    with (
        pytest.raises(UserError, match=r"thesis\.txt: a file is there"),
        files.atomic_folder(path / "thesis.txt"),
    ):
        pass
    assert [entry.name for entry in tmp_path.rglob("*")] == ["models", "thesis.txt"]


def test_files_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "value.json"
    script = (
        "import os, signal; from pathlib import Path; from tokamake import files\n"
        f"with files.atomic(Path({str(path)!r})) as (temporary,):\n"
        "    temporary.write_text('half'); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=False)
    assert len(list(tmp_path.iterdir())) == 1
    files.write_json(path, 1)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("content", [None, "{half", b"\xff\xfe"])
def test_unreadable_json_names_the_file_and_the_remedy(
    tmp_path: Path, content: str | bytes | None
) -> None:
    path = tmp_path / "value.json"
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(UserError, match=r"value\.json: .*; make it again"):
        files.read_json(path, "make it again")


def test_digest_ignores_key_order() -> None:
    assert files.digest({"a": 1, "b": 2}) == files.digest({"b": 2, "a": 1})
    assert files.digest({"a": 1, "b": 2}) != files.digest({"a": 1, "b": 3})
