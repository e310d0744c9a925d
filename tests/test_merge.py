"""Merging is concatenation, and a damaged shard is named instead of merged."""

import os
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset as MegatronDataset

from tokamake.data import pairs
from tokamake.data.merge import merge
from tokamake.data.tokenize import tokenize
from tokamake.data.trace import trace
from tokamake.errors import UserError


@pytest.fixture
def shards(workspace: Path) -> list[Path]:
    raw = sorted((workspace / "raw/code").iterdir())
    prefixes = [workspace / f"shards/{number}" for number in range(len(raw))]
    for prefix, path in zip(prefixes, raw, strict=True):
        tokenize((str(path),), output=prefix, tokenizer=workspace / "tokenizer")
    return prefixes


def test_merge_equals_concatenation_and_tokenizing_at_once(
    workspace: Path, shards: list[Path]
) -> None:
    merge(shards, output=workspace / "merged", corpus="code")
    joined = b"".join(pairs.bin_path(prefix).read_bytes() for prefix in shards)
    assert (workspace / "merged.bin").read_bytes() == joined
    tokenize(
        tuple(map(str, sorted((workspace / "raw/code").iterdir()))),
        output=workspace / "whole",
        tokenizer=workspace / "tokenizer",
    )
    for suffix in (".bin", ".idx"):
        assert (workspace / f"merged{suffix}").read_bytes() == (
            workspace / f"whole{suffix}"
        ).read_bytes()


def test_megatron_reads_the_same_documents(workspace: Path, shards: list[Path]) -> None:
    merge(shards, output=workspace / "merged")
    merged = MegatronDataset(str(workspace / "merged"))
    parts = [MegatronDataset(str(prefix)) for prefix in shards]
    expected = [np.array(document) for part in parts for document in part]
    assert len(merged) == len(expected)
    assert all(
        np.array_equal(found, wanted) for found, wanted in zip(merged, expected, strict=True)
    )
    assert list(merged.document_indices) == list(range(len(expected) + 1))
    manifest = pairs.read_manifest(workspace / "merged")
    assert (manifest["documents"], manifest["tokens"]) == (len(expected), sum(map(len, expected)))


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(bytes(content))


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


@pytest.mark.parametrize("suffix", [".bin", ".idx", ".json"])
@pytest.mark.parametrize("damage", [flip_a_byte, shorten, Path.unlink])
def test_damaged_shards_are_named(workspace: Path, shards: list[Path], suffix: str, damage) -> None:  # type: ignore[no-untyped-def]
    damage(shards[1].with_name(shards[1].name + suffix))
    with pytest.raises(UserError, match="shards/1"):
        merge(shards, output=workspace / "merged")
    assert not list(workspace.glob("merged*"))
    assert not list(workspace.glob(".merged*"))
    assert "shards/1" in (pairs.broken(shards[1]) or "")
    assert pairs.broken(shards[0]) is None


def test_shards_of_another_tokenizer_are_refused(workspace: Path, shards: list[Path]) -> None:
    raw = sorted((workspace / "raw/code").iterdir())
    tokenize((str(raw[0]),), output=shards[1], tokenizer=workspace / "tokenizer", append_eod=False)
    with pytest.raises(UserError, match="append_eod is False, but True"):
        merge(shards, output=workspace / "merged")
    with pytest.raises(UserError, match="no pair given"):
        merge([], output=workspace / "merged")
    (workspace / "shards/0.json").write_text("{}")
    with pytest.raises(UserError, match="not the manifest"):
        merge(shards, output=workspace / "merged")


def test_a_shortened_pair_is_broken_whatever_its_time(shards: list[Path]) -> None:
    path = pairs.bin_path(shards[0])
    before = path.stat()
    path.write_bytes(path.read_bytes()[:-2])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert "bytes, its manifest says" in (pairs.broken(shards[0]) or "")


def test_a_touched_but_whole_pair_is_not_broken(shards: list[Path]) -> None:
    pairs.bin_path(shards[0]).touch()
    assert pairs.broken(shards[0]) is None


def test_merged_pairs_merge_again_and_keep_their_sources(
    workspace: Path, shards: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    merge(shards[:1], output=workspace / "one")
    merge([workspace / "one", *shards[1:]], output=workspace / "all")
    merge(shards, output=workspace / "at once")
    for suffix in (".bin", ".idx", ".sources"):
        assert (workspace / f"all{suffix}").read_bytes() == (
            workspace / f"at once{suffix}"
        ).read_bytes()
    capsys.readouterr()
    trace(workspace / "all", -1, max_characters=0)
    assert pairs.inputs(pairs.read_manifest(shards[-1]))[0]["path"] in capsys.readouterr().out


def test_a_pair_is_not_merged_into_itself(shards: list[Path]) -> None:
    before = pairs.bin_path(shards[0]).read_bytes()
    with pytest.raises(UserError, match="is to be read and written"):
        merge(shards, output=shards[0])
    assert pairs.bin_path(shards[0]).read_bytes() == before
