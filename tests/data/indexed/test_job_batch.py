"""A batch file stands for its datasets: later changes to them are faults, nothing else is."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tokamake.data.indexed import job_batch
from tokamake.data.indexed.manifest import sizes_and_hashes, write_manifest
from tokamake.errors import UserError

SUFFIXES = ("bin", "idx", "sources", "json")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Datasets a/0 and a/1 and their batch file."""
    (tmp_path / "a").mkdir()
    for name in "01":
        paths = [tmp_path / f"a/{name}.{suffix}" for suffix in SUFFIXES]
        for path in paths[:-1]:
            path.write_text(f"{path.name} intact")
        counts = {"documents": 1, "tokens": 2, "request": name}
        write_manifest(paths[-1], {**counts, **sizes_and_hashes(*paths[:-1])})
    prefixes = [tmp_path / "a" / name for name in "01"]
    job_batch.write_batch(tmp_path / "batch.json", "a-00000", folder=tmp_path, prefixes=prefixes)
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


def test_intact_datasets_have_no_fault(folder: Path) -> None:
    assert fault(folder) is None
    (folder / "a/1.bin").touch()
    assert fault(folder) is None


DAMAGES = [(damage, suffix) for damage in (Path.unlink, flip) for suffix in SUFFIXES]
DAMAGES += [(cut, suffix) for suffix in SUFFIXES[:-1]]  # no file states the size of a manifest


@pytest.mark.parametrize(("damage", "suffix"), DAMAGES)
def test_damage_to_any_file_is_a_fault(
    folder: Path, suffix: str, damage: Callable[[Path], None]
) -> None:
    damage(folder / f"a/1.{suffix}")
    assert f"a/1.{suffix}" in str(fault(folder))


def test_a_dataset_rebuilt_with_other_content_is_a_fault(folder: Path) -> None:
    (folder / "a/1.bin").write_text("1.bin other")
    paths = [folder / f"a/1.{suffix}" for suffix in SUFFIXES]
    write_manifest(paths[-1], {"documents": 1, **sizes_and_hashes(*paths[:-1])})
    for path in paths:
        later = (folder / "batch.json").stat().st_mtime_ns + 1
        os.utime(path, ns=(later, later))
    assert "a/1 does not match" in str(fault(folder))


def test_an_invalid_batch_file_is_a_fault(folder: Path) -> None:
    (folder / "batch.json").write_text("[]")
    assert "batch.json: not a batch file" in str(fault(folder))
    (folder / "batch.json").unlink()
    assert "batch.json" in str(fault(folder))


def test_a_failing_member_does_not_stop_the_others() -> None:
    written = []

    def make(member: int) -> None:
        if member % 2:
            raise UserError(f"{member} is odd")
        written.append(member)

    with pytest.raises(UserError, match=r"^1 is odd\n3 is odd$"):
        job_batch.make_each(range(5), make)
    assert written == [0, 2, 4]


def test_finished_compares_the_request(folder: Path) -> None:
    prefixes = [folder / "a/0"]
    assert job_batch.finished(prefixes, "0")
    assert not job_batch.finished(prefixes, "1")
    (folder / "a/0.idx").unlink()
    assert not job_batch.finished(prefixes, "0")
