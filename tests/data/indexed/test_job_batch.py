"""A batch file vouches for its pairs; what has changed since is noticed, and nothing else."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tokamake.data.indexed import job_batch
from tokamake.data.indexed.manifest import sizes_and_hashes, write_manifest
from tokamake.errors import UserError

PARTS = ("bin", "idx", "sources", "json")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Pairs a/0 and a/1 and their batch file."""
    (tmp_path / "a").mkdir()
    for name in "01":
        paths = [tmp_path / f"a/{name}.{part}" for part in PARTS]
        for path in paths[:-1]:
            path.write_text(f"{path.name} whole")
        counts = {"documents": 1, "tokens": 2, "request": name}
        write_manifest(paths[-1], {**counts, **sizes_and_hashes(*paths[:-1])})
    prefixes = [tmp_path / "a" / name for name in "01"]
    job_batch.write_batch(tmp_path / "batch.json", "a-00000", tmp_path, prefixes)
    return tmp_path


def fault(folder: Path) -> str | None:
    return job_batch.find_batch_fault(folder / "batch.json", str(folder))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(bytes(content))
    later = (path.parent.parent / "batch.json").stat().st_mtime_ns + 1
    os.utime(path, ns=(later, later))


def cut(path: Path) -> None:
    written = path.stat().st_mtime_ns
    os.truncate(path, 3)
    os.utime(path, ns=(written, written))


def test_whole_pairs_are_whole(folder: Path) -> None:
    assert fault(folder) is None
    (folder / "a/1.bin").touch()
    assert fault(folder) is None


DAMAGES = [(damage, part) for damage in (Path.unlink, flip) for part in PARTS]
DAMAGES += [(cut, part) for part in PARTS[:-1]]  # the size of a manifest stands nowhere


@pytest.mark.parametrize(("damage", "part"), DAMAGES)
def test_damage_to_any_file_is_seen(
    folder: Path, part: str, damage: Callable[[Path], None]
) -> None:
    damage(folder / f"a/1.{part}")
    assert f"a/1.{part}" in str(fault(folder))


def test_a_pair_made_anew_with_other_content_is_seen(folder: Path) -> None:
    (folder / "a/1.bin").write_text("1.bin other")
    paths = [folder / f"a/1.{part}" for part in PARTS]
    write_manifest(paths[-1], {"documents": 1, **sizes_and_hashes(*paths[:-1])})
    for path in paths:
        later = (folder / "batch.json").stat().st_mtime_ns + 1
        os.utime(path, ns=(later, later))
    assert "a/1 does not match" in str(fault(folder))


def test_a_batch_file_that_is_none_is_a_fault(folder: Path) -> None:
    (folder / "batch.json").write_text("[]")
    assert "batch.json: not a batch file" in str(fault(folder))
    (folder / "batch.json").unlink()
    assert "batch.json" in str(fault(folder))


def test_one_member_that_fails_keeps_no_other_from_being_made() -> None:
    made = []

    def make(member: int) -> None:
        if member % 2:
            raise UserError(f"{member} is odd")
        made.append(member)

    with pytest.raises(UserError, match=r"^1 is odd\n3 is odd$"):
        job_batch.make_each(range(5), make)
    assert made == [0, 2, 4]


def test_finished_is_what_was_asked_for(folder: Path) -> None:
    prefixes = [folder / "a/0"]
    assert job_batch.finished(prefixes, "0")
    assert not job_batch.finished(prefixes, "1")
    (folder / "a/0.idx").unlink()
    assert not job_batch.finished(prefixes, "0")
