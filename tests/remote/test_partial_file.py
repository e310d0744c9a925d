"""A beginning of a download has one owner, and is taken over when its owner is gone."""

import os
import subprocess
from pathlib import Path

from tokamake.files import process_place
from tokamake.remote.partial_file import claim, release


def test_what_was_given_up_is_claimed_once(tmp_path: Path) -> None:
    path = tmp_path / "a[1].bin"
    own = claim(path)
    own.write_bytes(b"begin")
    release(own, path)
    assert claim(path).read_bytes() == b"begin"
    assert not (tmp_path / "a[1].bin.incomplete").exists()


def test_beginnings_of_living_processes_are_left_alone(tmp_path: Path) -> None:
    parent = tmp_path / f"a.incomplete-{process_place()}-{os.getppid()}-1"
    parent.write_bytes(b"mine")
    assert not claim(tmp_path / "a").exists()
    assert parent.exists()


def test_beginnings_of_dead_processes_are_taken_over(tmp_path: Path) -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    dead = tmp_path / f"a.incomplete-{process_place()}-{process.pid}-1"
    dead.write_bytes(b"begin")
    assert claim(tmp_path / "a").read_bytes() == b"begin"


def test_beginnings_of_other_machines_are_taken_over_after_an_hour(tmp_path: Path) -> None:
    other = tmp_path / "a.incomplete-other-0123456789ab-1-1"
    other.write_bytes(b"begin")
    assert not claim(tmp_path / "a").exists()
    os.utime(other, (0, 0))
    assert claim(tmp_path / "a").read_bytes() == b"begin"
