"""`merge` concatenates datasets, and refuses a damaged one by name."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.tokenized import tokenized
from tokamake.data.indexed import kernel_copy
from tokamake.data.indexed.dataset import IndexWriter
from tokamake.data.indexed.manifest import find_fault, raw_inputs, read_manifest
from tokamake.data.indexed.merge import merge
from tokamake.data.indexed.paths import bin_path
from tokamake.data.indexed.trace import trace
from tokamake.errors import UserError


def test_merging_shards_equals_concatenating_them_and_tokenizing_all_files_at_once(
    workspace: Path, shards: list[Path]
) -> None:
    merge(shards, output=workspace / "merged", corpus="code")
    joined = b"".join(bin_path(prefix).read_bytes() for prefix in shards)
    assert (workspace / "merged.bin").read_bytes() == joined
    tokenized(workspace, *tuple(map(str, sorted((workspace / "raw/code").iterdir()))), name="whole")
    for suffix in (".bin", ".idx"):
        assert (workspace / f"merged{suffix}").read_bytes() == (
            workspace / f"whole{suffix}"
        ).read_bytes()


def test_datasets_of_several_text_keys_are_merged(workspace: Path) -> None:
    for key in ("text", "title"):
        (workspace / f"{key}.jsonl").write_text(f'{{"{key}": "def run"}}\n' * 2)
        tokenized(workspace, f"{key}.jsonl", name=key, text_key=(key,))
    # A prefix may have the end of one of its files.
    merge([workspace / "text.idx", workspace / "title.bin"], output=workspace / "both")
    manifest = read_manifest(workspace / "both")
    assert manifest["documents"] == 4
    assert "text_key" not in manifest
    merge([workspace / "text"], output=workspace / "one")
    assert read_manifest(workspace / "one")["text_key"] == "text"


def test_a_folder_is_no_prefix_to_write(workspace: Path, shards: list[Path]) -> None:
    (workspace / "out").mkdir()
    with pytest.raises(UserError, match=r"out: is a folder; give a prefix, such as .*out/NAME"):
        merge(shards, output=workspace / "out")
    raw = str(next((workspace / "raw/code").iterdir()))
    with pytest.raises(UserError, match=r"out: is a folder; give a prefix"):
        tokenized(workspace, raw, name="out")
    assert not list(workspace.glob("out*.bin"))


def overwrite(path: Path, content: bytes) -> None:
    """Write a file with a time after its manifest's; the clock may not advance in between."""
    written = path.with_suffix(".json").stat().st_mtime_ns
    path.write_bytes(content)
    os.utime(path, ns=(written, written + 1))


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    overwrite(path, bytes(content))


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


@pytest.mark.parametrize("suffix", [".bin", ".idx", ".json"])
@pytest.mark.parametrize("damage", [flip_a_byte, shorten, Path.unlink])
def test_errors_name_damaged_shards(
    workspace: Path, shards: list[Path], suffix: str, damage
) -> None:  # type: ignore[no-untyped-def]
    damage(shards[1].with_name(shards[1].name + suffix))
    with pytest.raises(UserError, match="shards/code-1"):
        merge(shards, output=workspace / "merged")
    assert not list(workspace.glob("merged*"))
    assert not list(workspace.glob(".merged*"))
    assert "shards/code-1" in (find_fault(shards[1]) or "")
    assert find_fault(shards[0]) is None


def test_shards_of_another_tokenizer_are_refused(workspace: Path, shards: list[Path]) -> None:
    raw = sorted((workspace / "raw/code").iterdir())
    tokenized(workspace, raw[0], name=shards[1], append_eod=False)
    with pytest.raises(UserError, match="append_eod is False, but True"):
        merge(shards, output=workspace / "merged")
    with pytest.raises(UserError, match="no dataset given"):
        merge([], output=workspace / "merged")
    (workspace / "shards/code-0.json").write_text("{}")
    with pytest.raises(UserError, match="not the manifest"):
        merge(shards, output=workspace / "merged")


def test_a_truncated_dataset_is_damaged_whatever_its_time(shards: list[Path]) -> None:
    path = bin_path(shards[0])
    before = path.stat()
    path.write_bytes(path.read_bytes()[:-2])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert "bytes, its manifest says" in (find_fault(shards[0]) or "")


def test_a_touched_but_intact_dataset_is_not_damaged(shards: list[Path]) -> None:
    bin_path(shards[0]).touch()
    assert find_fault(shards[0]) is None


def test_merged_datasets_can_be_merged_and_keep_their_sources(
    workspace: Path, shards: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    merge(shards[:1], output=workspace / "first")
    merge([workspace / "first", *shards[1:]], output=workspace / "all")
    merge(shards, output=workspace / "at once")
    for suffix in (".bin", ".idx", ".sources"):
        assert (workspace / f"all{suffix}").read_bytes() == (
            workspace / f"at once{suffix}"
        ).read_bytes()
    capsys.readouterr()
    trace(workspace / "all", -1, max_characters=0)
    assert raw_inputs(read_manifest(shards[-1]))[0]["path"] in capsys.readouterr().out


def test_a_dataset_is_not_merged_into_itself(shards: list[Path]) -> None:
    before = bin_path(shards[0]).read_bytes()
    with pytest.raises(UserError, match="is both input and output"):
        merge(shards, output=shards[0])
    assert bin_path(shards[0]).read_bytes() == before


def test_the_hash_of_a_merged_dataset_covers_every_byte(
    workspace: Path, shards: list[Path]
) -> None:
    merge(shards, output=workspace / "two")
    merge([workspace / "two", shards[0]], output=workspace / "three")
    merge([*shards, shards[0]], output=workspace / "at once")
    stepwise, at_once = (read_manifest(workspace / name) for name in ("three", "at once"))
    assert stepwise["parts"] == at_once["parts"]
    assert stepwise["sha256"]["bin"] == at_once["sha256"]["bin"]
    content = (workspace / "three.bin").read_bytes()
    assert sum(size for size, _ in stepwise["parts"]) == len(content)
    for position in (0, stepwise["parts"][0][0], len(content) - 1):
        damaged = bytearray(content)
        damaged[position] ^= 1
        overwrite(workspace / "three.bin", bytes(damaged))
        assert "differs from the hash" in (find_fault(workspace / "three") or "")
        with pytest.raises(UserError, match=r"three\.bin: damaged"):
            merge([workspace / "three"], output=workspace / "none")
    (workspace / "three.bin").write_bytes(content)
    assert find_fault(workspace / "three") is None


def failing(code: int) -> Callable[..., Any]:
    """Return a function that raises the OSError of a code."""

    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize(
    ("target", "name", "value", "message"),
    [
        (os, "fdatasync", failing(errno.EIO), "Input/output error"),  # a disk reports it late
        (
            kernel_copy,
            "METHODS",
            (failing(errno.ENOSPC), *kernel_copy.METHODS),
            "No space left on device",
        ),
        (IndexWriter, "finish", failing(errno.ENOSPC), "No space left on device"),
    ],
    ids=["at the end", "copying", "index"],
)
def test_a_disk_error_leaves_no_files(
    tmp_path: Path,
    others: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    target: object,
    name: str,
    value: object,
    message: str,
) -> None:
    monkeypatch.setattr(target, name, value)
    with pytest.raises(OSError, match=f"{message}, while writing"):
        merge(others, output=tmp_path / "out/none")
    assert not list((tmp_path / "out").iterdir())
