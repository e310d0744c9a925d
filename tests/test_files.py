"""Atomic writes: files are complete or absent."""

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path
from uuid import uuid4

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


def leave(folder: Path, owner: str, *, days_old: float = 0) -> Path:
    """Leave a temporary file, as a process of another place does, some days before now."""
    path = folder / f".value.json.tmp-{owner}"
    path.write_text("half")
    written = path.stat().st_mtime - days_old * 86400
    os.utime(path, (written, written))
    return path


OTHER_PLACE = "node7-0123456789ab-99999999"


def test_a_temporary_of_another_pid_namespace_stays_while_it_may_be_live(tmp_path: Path) -> None:
    namespace = ["unshare", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*namespace, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this machine allows no PID namespaces")
    path = tmp_path / "value.json"
    script = "from pathlib import Path; from tokamake import files\n"
    script += f"files.write_json(Path({str(path)!r}), 2)"
    with files.atomic(path) as (temporary,):
        temporary.write_text("half")
        subprocess.run([*namespace, sys.executable, "-c", script], check=True)
        assert path.read_text() == "2\n"
        assert temporary.exists()
    assert path.read_text() == "half"


def test_temporaries_of_another_host_are_removed_after_a_week(tmp_path: Path) -> None:
    recent = leave(tmp_path, "node7-0123456789ab-17", days_old=6)
    leave(tmp_path, "node8-0123456789ab-17", days_old=8)
    folder = tmp_path / ".index.tmp-node9-0123456789ab-17"
    folder.mkdir()
    (folder / "part").write_text("half")
    for entry in (folder / "part", folder):
        os.utime(entry, (0, 0))
    files.write_json(tmp_path / "value.json", 1)
    assert {entry.name for entry in tmp_path.iterdir()} == {"value.json", recent.name}


def test_a_process_that_wrote_this_week_keeps_its_other_temporaries(tmp_path: Path) -> None:
    old = leave(tmp_path, OTHER_PLACE, days_old=8)
    (tmp_path / f".value.bin.tmp-{OTHER_PLACE}").write_text("still growing")
    files.write_json(tmp_path / "value.json", 1)
    assert old.exists()


def test_a_wrong_clock_removes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = leave(tmp_path, OTHER_PLACE)
    monkeypatch.setattr("time.time", lambda: 2**33)
    files.write_json(tmp_path / "value.json", 1)
    assert temporary.exists()


def test_a_replaced_folder_that_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "index"
    script = (
        "import os, shutil, signal; from pathlib import Path; from tokamake import files\n"
        "shutil.rmtree = lambda path, **options: path.exists() and os.kill(os.getpid(), 9)\n"
        f"with files.atomic_folder(Path({str(path)!r})) as folder: (folder / 'a').touch()\n"
    )
    for _ in range(2):
        subprocess.run([sys.executable, "-c", script], check=False)
    assert len(list(tmp_path.iterdir())) == 2
    files.write_json(tmp_path / "value.json", 1)
    assert {entry.name for entry in tmp_path.iterdir()} == {"index", "value.json"}


def test_leftovers_of_a_process_with_our_pid_are_not_published(tmp_path: Path) -> None:
    files.write_json(tmp_path / "first", 1)  # from now on, this folder is not searched again
    optional = tmp_path / "optional"
    with files.atomic(optional) as (temporary,):
        temporary.touch()
    temporary.write_text("of a dead process")
    with files.atomic(tmp_path / "value", optional, tmp_path / "m", optional=[optional]) as paths:
        paths[0].touch()
        paths[2].touch()
    assert not optional.exists()


def test_a_link_is_followed(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    for name in ("existing", "new"):
        (tmp_path / name).symlink_to(scratch / name)
    (scratch / "existing").write_text("old")
    for name in ("existing", "new"):
        files.write_text(tmp_path / name, "text")
        assert (tmp_path / name).is_symlink()
        assert (scratch / name).read_text() == "text"
    assert {entry.name for entry in scratch.iterdir()} == {"existing", "new"}


def test_a_folder_that_is_a_link_to_another_disk_stays_there(tmp_path: Path) -> None:
    (tmp_path / "scratch/index").mkdir(parents=True)
    (tmp_path / "index").symlink_to("scratch/index")
    for content in ("1", "2"):
        with files.atomic_folder(tmp_path / "index") as folder:
            (folder / "a").write_text(content)
    assert (tmp_path / "index").is_symlink()
    assert (tmp_path / "scratch/index/a").read_text() == "2"
    assert [entry.name for entry in (tmp_path / "scratch").iterdir()] == ["index"]


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe, texts = tmp_path / "pipe", list[str]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: texts.append(pipe.read_text()), daemon=True)
    reader.start()
    files.write_text(pipe, "text")
    reader.join(60)
    assert texts == ["text"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert [entry.name for entry in tmp_path.iterdir()] == ["pipe"]


def test_a_terminal_is_written_to() -> None:
    main, terminal = os.openpty()
    name = Path(os.ttyname(terminal))
    files.write_text(name, "text")
    assert os.read(main, 100) == b"text"
    assert stat.S_ISCHR(name.stat().st_mode)
    os.close(main)
    os.close(terminal)


@pytest.mark.parametrize("kind", ["pipe", "file"])
@pytest.mark.parametrize("is_link", [True, False])
def test_standard_output_has_the_text_in_the_order_of_printing(
    tmp_path: Path, kind: str, is_link: bool
) -> None:
    # A link of ours: code that replaces /dev/stdout itself would break this machine.
    path = tmp_path / f"stdout-{uuid4()}"
    path.symlink_to("/proc/self/fd/1")
    name = str(path) if is_link else "-"
    script = (
        "from pathlib import Path; from tokamake import files\n"
        f"print('before'); files.write_text(Path({name!r}), 'text\\n'); print('after')"
    )
    command = [sys.executable, "-c", script]
    if kind == "pipe":
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    else:
        with (tmp_path / "log").open("w") as log:
            subprocess.run(command, stdout=log, check=True)
        printed = (tmp_path / "log").read_text()
    assert printed == "before\ntext\nafter\n"
    assert path.is_symlink()


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


def test_a_created_file_has_its_content_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is killed before has created nothing, one that is killed after all of it."""
    path, link = tmp_path / "owner", Path.hardlink_to
    seen = []

    def watched(self: Path, target: Path) -> None:
        seen.append((self.exists(), target.read_text()))
        link(self, target)

    monkeypatch.setattr(Path, "hardlink_to", watched)
    files.create_text(path, "first")
    assert seen == [(False, "first")]
    with pytest.raises(FileExistsError):
        files.create_text(path, "second")
    assert path.read_text() == "first"
    assert [*tmp_path.iterdir()] == [path]


def test_a_file_is_created_without_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: Path, target: Path) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", refused)
    files.create_text(tmp_path / "owner", "first")
    with pytest.raises(FileExistsError):
        files.create_text(tmp_path / "owner", "second")
    assert (tmp_path / "owner").read_text() == "first"
    assert [*tmp_path.iterdir()] == [tmp_path / "owner"]


def test_a_link_that_nfs_has_made_before_it_says_no_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = Path.hardlink_to

    def repeated(self: Path, target: Path) -> None:
        link(self, target)
        raise FileExistsError(17, "File exists")

    monkeypatch.setattr(Path, "hardlink_to", repeated)
    files.create_text(tmp_path / "owner", "first")
    assert (tmp_path / "owner").read_text() == "first"


def test_sealed_json_is_read_back_and_any_changed_digit_is_refused(tmp_path: Path) -> None:
    path, value = tmp_path / "state.json", {"step": 12, "rate": 0.5, "names": ["ä", "b"]}
    files.write_sealed_json(path, value)
    assert files.read_sealed_json(path, "") == value
    path.write_text(path.read_text().replace("12", "13"))
    with pytest.raises(
        UserError, match=r"state\.json: damaged: does not match its sha256; restore"
    ):
        files.read_sealed_json(path, "restore it")


def test_json_of_an_earlier_version_has_no_seal(tmp_path: Path) -> None:
    files.write_json(tmp_path / "state.json", {"step": 12})
    assert files.read_sealed_json(tmp_path / "state.json", "") == {"step": 12}
    files.write_json(tmp_path / "state.json", [12])
    with pytest.raises(UserError, match="damaged: not a JSON object"):
        files.read_sealed_json(tmp_path / "state.json", "")
