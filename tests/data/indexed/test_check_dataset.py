"""`describe` reads datasets byte by byte, and reports every fault of every dataset."""

import os
import re
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset as MegatronDataset

from tests.support.megatron_datasets import overwrite, write_megatron_dataset
from tests.support.runs import vouch
from tokamake.data.indexed import check_dataset
from tokamake.data.indexed.check_dataset import check_foreign, stated_vocabulary
from tokamake.data.indexed.describe import describe
from tokamake.data.indexed.manifest import read_manifest, sizes_and_hashes, write_manifest
from tokamake.data.indexed.paths import bin_path, file_path, idx_path, manifest_path
from tokamake.errors import UserError


def test_intact_datasets_are_whole(
    workspace: Path, ours: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    describe([workspace / "merged", workspace / "shards"])
    header, *rows, last = capsys.readouterr().out.splitlines()
    assert header.split() == [
        *("dataset", "documents", "sequences", "tokens", "bytes", "dtype", "tokenizer", "verdict")
    ]
    assert last == "3 datasets, none damaged"
    for row, prefix in zip(rows, [ours[2], *ours[:2]], strict=True):
        reference = MegatronDataset(str(prefix))
        tokens = int(reference.sequence_lengths.sum())
        numbers = len(reference.document_indices) - 1, len(reference), tokens, 2 * tokens
        name = read_manifest(prefix)["tokenizer"][:12]
        assert row.split() == [str(prefix), *(f"{n:,}" for n in numbers), "uint16", name, "whole"]


@pytest.mark.parametrize("name", ["bin", "idx", "sources"])
@pytest.mark.parametrize("position", [0, 20_000, -1])
def test_each_flipped_byte_is_a_fault(
    ours: list[Path], name: str, position: int, capsys: pytest.CaptureFixture[str]
) -> None:
    path = file_path(ours[2], name)
    content = bytearray(path.read_bytes())
    content[position % len(content)] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"all\.{name}") as raised:
        describe(ours)
    lines = str(raised.value).splitlines()
    assert all(f"{ours[2]}." in line for line in lines)
    assert any("differs from the hash in its manifest" in line for line in lines)
    if name == "bin":
        part = 1 if 0 <= position < bin_path(ours[0]).stat().st_size else 2
        assert f"its part {part} of 2 " in lines[0]
    assert "1 damaged" in capsys.readouterr().out


def test_all_faults_of_all_datasets_are_reported(ours: list[Path]) -> None:
    os.truncate(bin_path(ours[0]), 100)
    overwrite(idx_path(ours[1]), 34, 1, "<i")
    (ours[1].parent / f"{ours[1].name}.sources").unlink()
    manifest_path(ours[2]).write_text("{}")
    with pytest.raises(UserError) as raised:
        describe(ours)
    text = str(raised.value)
    for message in (
        r"code-0\.bin: has 100 bytes, its manifest says",
        r"code-0\.bin: 100 bytes, but its index counts",
        r"code-0\.bin: .* differs from the hash",
        r"code-1: its index differs from its manifest: tokens",
        r"code-1\.idx: sequence 1 begins at",
        r"code-1\.idx: differs from the hash",
        r"code-1\.sources: is missing",
        r"all\.json: not the manifest of an indexed dataset",
    ):
        assert re.search(message, text), message


def test_tokens_outside_the_vocabulary_are_faults(tmp_path: Path) -> None:
    prefix = write_megatron_dataset(
        tmp_path / "code-0", [[*range(300), 400, 9], [399, 401, 9]], np.int32
    )
    paths = bin_path(prefix), idx_path(prefix)
    counts = {"documents": 2, "sequences": 2, "tokens": 305, "dtype": "int32", "inputs": []}
    messages = {402: None, 401: "1 token .* 304: 401;", 400: "2 tokens .* 300: 400;"}
    for size, message in messages.items():
        manifest = {**counts, "vocab_size": size, **sizes_and_hashes(*paths)}
        write_manifest(manifest_path(prefix), manifest)
        if message is None:
            describe([prefix])
            continue
        pattern = message.replace("304", "303")
        with pytest.raises(UserError, match=rf"code-0\.bin: {pattern}"):
            describe([prefix])


def test_a_manifest_without_counts_is_a_fault(tmp_path: Path) -> None:
    prefix = write_megatron_dataset(tmp_path / "code-0", [[1, 2]])
    manifest = {"tokens": 2, **sizes_and_hashes(bin_path(prefix), idx_path(prefix))}
    write_manifest(manifest_path(prefix), manifest)
    with pytest.raises(UserError, match=r"code-0\.json: no documents, sequences; remove"):
        describe([prefix])


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a small dataset as many tasks and blocks as a large one."""
    monkeypatch.setattr(check_dataset, "_TASK_TOKENS", 70)
    monkeypatch.setattr(check_dataset, "_BLOCK_TOKENS", 16)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64, np.uint8])
@pytest.mark.parametrize("position", [0, 15, 16, 69, 70, 499])
def test_the_largest_token_is_found_at_any_position(
    tmp_path: Path, dtype: type, position: int
) -> None:
    tokens = np.random.default_rng(1).integers(0, 200, 500)
    tokens[position] = 201
    prefix = write_megatron_dataset(tmp_path / "other", [tokens.tolist()], dtype, longest=90)
    assert check_foreign(prefix) == 201


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("position", [0, 69, 70, 499])
def test_the_first_negative_token_is_named(tmp_path: Path, position: int) -> None:
    prefix = write_megatron_dataset(tmp_path / "other", [[5] * 500], np.int32)
    for negative in (499, position):
        overwrite(tmp_path / "other.bin", 4 * negative, -1 - negative, "<i")
    message = rf"other\.bin: token {position} is {-1 - position}, below 0"
    with pytest.raises(UserError, match=message):
        check_foreign(prefix)


@pytest.mark.parametrize("bound", [-1, 0, 3, 2**62])
def test_document_bounds_that_do_not_ascend_are_refused(tmp_path: Path, bound: int) -> None:
    prefix = write_megatron_dataset(tmp_path / "other", [[5], [6]])
    size = (tmp_path / "other.idx").stat().st_size
    overwrite(tmp_path / "other.idx", size - 8, bound, "<q")
    with pytest.raises(UserError, match=r"other\.idx: document bounds do not ascend from 0 to 2"):
        check_foreign(prefix)


def test_document_bounds_that_wrap_around_are_refused(tmp_path: Path) -> None:
    prefix = write_megatron_dataset(tmp_path / "other", [[5]] * 5)
    size = (tmp_path / "other.idx").stat().st_size
    for place, bound in enumerate((2**63 - 1, -(2**63), -1), 1):
        overwrite(tmp_path / "other.idx", size - 8 * (6 - place), bound, "<q")
    with pytest.raises(UserError, match=r"other\.idx: document bounds do not ascend from 0 to 5"):
        check_foreign(prefix)


def test_a_dataset_without_tokens_has_no_largest_token(tmp_path: Path) -> None:
    assert check_foreign(write_megatron_dataset(tmp_path / "other", [[], []])) == -1


def test_only_a_manifest_states_a_vocabulary(tmp_path: Path) -> None:
    prefix = write_megatron_dataset(tmp_path / "other", [[1, 2]])
    assert stated_vocabulary(prefix) is None
    vouch(prefix)
    assert stated_vocabulary(prefix) is None
    vouch(prefix, vocab_size=7)
    assert stated_vocabulary(prefix) == 7
