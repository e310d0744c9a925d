"""Only one process trains in a folder, also where flock does not work."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tokamake.errors import UserError
from tokamake.runtime import folder_lock
from tokamake.runtime.folder_lock import locked

CHILD = """
import fcntl, os, sys
from pathlib import Path
from tokamake.runtime.folder_lock import locked

def fail(*_):
    raise OSError(38, "Function not implemented")

fcntl.flock = {"none": fail, "local": lambda *_: None, "shared": fcntl.flock}[sys.argv[2]]
with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
    if sys.argv[3:]:
        os.kill(os.getpid(), 9)
"""


def run(output: Path, flock: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CHILD, str(output), flock, *arguments]
    return subprocess.run(command, input="", capture_output=True, text=True, check=False)


@pytest.fixture(params=["shared", "none", "local"])
def flock(request: pytest.FixtureRequest) -> str:
    """Locks of the file system: seen by all, none, or seen by their own host only."""
    return str(request.param)


def owner_file(output: Path) -> Path:
    return output.with_name(f".{output.name}.owner")


@pytest.mark.fault("second trainer")
def test_only_one_process_trains_in_a_folder(flock: str, tmp_path: Path) -> None:
    output = tmp_path / "training"
    with locked(output):
        refused = run(output, flock)
        assert f"another process trains there; end it (pid {os.getpid()} on" in refused.stderr
        assert refused.stdout == ""
    assert run(output, flock).stdout == "locked\n"
    assert not owner_file(output).exists()


@pytest.mark.fault("full disk")
def test_a_full_disk_leaves_no_lock(
    flock: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "training"

    def long_words(_: object) -> str:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(folder_lock._Owner, "__iter__", long_words)
        with pytest.raises(OSError, match="No space left"), locked(output):
            pass
    assert not owner_file(output).exists()
    assert run(output, flock).stdout == "locked\n"


def test_a_killed_process_leaves_no_lock(flock: str, tmp_path: Path) -> None:
    output = tmp_path / "training"
    assert run(output, flock, "killed").returncode == -9
    assert owner_file(output).exists()
    assert run(output, flock).stdout == "locked\n"
    assert [*tmp_path.iterdir()] == [tmp_path / ".training.lock"]


def test_a_process_id_that_is_used_again_is_no_lock(flock: str, tmp_path: Path) -> None:
    output = tmp_path / "training"
    here = folder_lock._Owner.here()
    owner_file(output).write_text(" ".join(here._replace(started="1")))
    assert run(output, flock).stdout == "locked\n"


def test_a_lock_from_before_a_reboot_is_no_lock(flock: str, tmp_path: Path) -> None:
    output = tmp_path / "training"
    owner_file(output).write_text(" ".join(folder_lock._Owner.here()._replace(boot="other")))
    assert run(output, flock).stdout == "locked\n"


@pytest.mark.parametrize("text", ["", "1 2", "other host"])
def test_the_lock_of_another_host_is_kept(text: str, flock: str, tmp_path: Path) -> None:
    output = tmp_path / "training"
    other = folder_lock._Owner("17", "1", "pid:[1]", "other", "node9", "'/clone a'")
    owner_file(output).write_text(" ".join(other) if text == "other host" else text)
    process = "pid 17 on node9 in '/clone a'" if text == "other host" else "its owner is not known"
    error = run(output, flock).stderr
    assert f"{output}: locked by a process of another host ({process})" in error
    assert f"if that process has ended, remove {owner_file(output)}" in error
    owner_file(output).unlink()
    assert run(output, flock).stdout == "locked\n"


def test_the_flock_decides_where_all_hosts_see_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "training"
    other = " ".join(folder_lock._Owner("17", "1", "pid:[1]", "other", "node9", "'/clone a'"))
    owner_file(output).write_text(other)
    monkeypatch.setattr(folder_lock, "_is_flock_shared", lambda _: True)
    with locked(output):
        pass  # node9 was lost: a job on this host continues
    owner_file(output).write_text(other)

    def fail(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(UserError, match="remove"), locked(output):
        pass


@pytest.mark.parametrize(
    ("mount", "shared"),
    [
        ("lustre rw,flock,lazystatfs", True),
        ("lustre rw,localflock", False),
        ("lustre rw", False),
        ("nfs4 rw,vers=4.2,local_lock=none", True),
        ("nfs rw,nolock", False),
        ("nfs rw,local_lock=all", False),
        ("gpfs rw", True),
        ("beegfs rw", False),
        ("ext4 rw", False),
    ],
)
def test_mounts_tell_whether_other_hosts_see_a_flock(
    mount: str, shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = f"root / ext4 rw 0 0\nx {tmp_path} {mount} 0 0\ny {tmp_path}-2 gpfs rw 0 0\n"
    monkeypatch.setattr(Path, "read_text", lambda _: lines)
    assert folder_lock._is_flock_shared(tmp_path / "folder") is shared


def test_a_file_system_that_is_not_listed_is_not_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "read_text", lambda _: "proc /proc proc rw 0 0\n")
    assert not folder_lock._is_flock_shared(tmp_path)
