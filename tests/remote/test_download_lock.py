"""The lock of a download has one owner, and is taken over when its owner is gone."""

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tokamake.remote.download_lock import claim, release
from tokamake.temporary_names import process_place


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a [1].bin"


def locked_by(path: Path, place: str, pid: int) -> Path:
    lock = path.with_name(f"{path.name}!lock")
    lock.write_text(f"{place} {pid}")
    return lock


def can_claim(path: Path) -> bool:
    result = claim(path, path.with_name("partial"))
    names = {each.name for each in path.parent.iterdir()}
    assert names <= {f"{path.name}!lock", "partial"}  # nothing else is left
    return result


def test_a_lock_is_had_once_until_it_is_released(path: Path) -> None:
    assert can_claim(path)
    assert not can_claim(path)
    release(path)
    assert can_claim(path)


def test_without_hard_links_a_lock_is_had_once_too(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, target: Path) -> None:
        raise PermissionError(f"{self} {target}")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    locked_by(path, process_place(), dead_pid())
    assert can_claim(path)
    assert not can_claim(path)


def test_one_of_many_threads_gets_it(path: Path) -> None:
    for number in range(50):
        each = path.with_name(f"{number}")
        locked_by(each, process_place(), dead_pid())
        with ThreadPoolExecutor(8) as pool:
            results = list(pool.map(claim, [each] * 8, [path] * 8))
        assert results.count(True) == 1


def dead_pid() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_the_lock_of_a_dead_process_is_taken_over(path: Path) -> None:
    locked_by(path, process_place(), os.getppid())
    assert not can_claim(path)
    locked_by(path, process_place(), dead_pid())
    assert can_claim(path)


def test_the_lock_of_another_machine_is_taken_over_after_an_hour_without_a_byte(
    path: Path,
) -> None:
    lock = locked_by(path, "other-0123456789ab", 1)
    assert not can_claim(path)
    os.utime(lock, (0, 0))
    partial = path.with_name("partial")
    partial.touch()
    assert not can_claim(path)
    os.utime(partial, (0, 0))
    assert can_claim(path)
