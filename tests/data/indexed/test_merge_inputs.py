"""`merge` merges datasets of other programs as Megatron does, and refuses damaged ones by name."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset as MegatronDataset
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from torch import tensor

from tests.support.megatron_datasets import (
    MERGE_INPUTS,
    assert_same_dataset,
    megatron_merge,
    overwrite,
    write_megatron_dataset,
)
from tokamake.data.indexed.describe import describe
from tokamake.data.indexed.manifest import find_fault, read_manifest, write_manifest
from tokamake.data.indexed.merge import merge
from tokamake.data.indexed.paths import manifest_path
from tokamake.data.indexed.trace import trace
from tokamake.data.samples.index_folder import identity
from tokamake.errors import UserError


def build(prefix: Path, documents: list[list[int]], dtype: type = np.uint16) -> Path:
    return write_megatron_dataset(prefix, documents, dtype, longest=2)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.int64])
def test_datasets_of_other_programs_merge_as_in_megatron(tmp_path: Path, dtype: type) -> None:
    prefixes = [
        build(tmp_path / f"p{number}", documents, dtype)
        for number, documents in enumerate(MERGE_INPUTS)
    ]
    merge(prefixes, output=tmp_path / "merged")
    assert_same_dataset(tmp_path / "merged", megatron_merge(prefixes, tmp_path / "megatron", dtype))
    assert not (tmp_path / "merged.sources").exists()
    manifest = read_manifest(tmp_path / "merged")
    assert (manifest["documents"], manifest["sequences"], manifest["tokens"]) == (6, 7, 10)
    assert manifest["dtype"] == dtype.__name__
    assert not {"tokenizer", "text_bytes", "empty_documents"} & set(manifest)
    assert find_fault(tmp_path / "merged") is None


def test_datasets_of_other_programs_cannot_be_traced(others: list[Path]) -> None:
    with pytest.raises(UserError, match="p0: has no manifest and no sources file"):
        trace(others[0], 0)


def test_indexes_larger_than_one_chunk_merge(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    prefixes = []
    for number in range(2):
        counts = rng.integers(0, 3, 1_300_000)
        lengths = rng.integers(0, 3, counts.sum())
        bounds = np.concatenate([[0], counts.cumsum()])
        prefixes.append(tmp_path / f"p{number}")
        Path(f"{prefixes[-1]}.bin").write_bytes(bytes(int(lengths.sum())))
        with open(f"{prefixes[-1]}.idx", "wb") as stream:
            stream.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 1, len(lengths), len(bounds)))
            stream.write(lengths.astype("<i4").tobytes())
            stream.write((lengths.cumsum() - lengths).astype("<i8").tobytes())
            stream.write(bounds.astype("<i8").tobytes())
    merge(prefixes, output=tmp_path / "merged")
    assert_same_dataset(
        tmp_path / "merged", megatron_merge(prefixes, tmp_path / "megatron", np.uint8)
    )


def test_the_manifest_leaves_out_keys_that_one_input_lacks(
    workspace: Path, shards: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    foreign = build(workspace / "foreign", [[1, 2, 3], [], [4]])
    merge([*shards, foreign], output=workspace / "mixed", corpus="code")
    merge([workspace / "mixed", shards[0]], output=workspace / "again")
    assert_same_dataset(
        workspace / "again",
        megatron_merge([*shards, foreign, shards[0]], workspace / "megatron", np.uint16),
    )
    assert not (workspace / "again.sources").exists()
    describe([workspace / "mixed", workspace / "again"], output=workspace / "metadata.json")
    for described in json.loads((workspace / "metadata.json").read_text()):
        reference = MegatronDataset(str(workspace / described["data_prefix"]))
        assert described["total_num_docs"] == len(reference.document_indices) - 1
        assert described["total_num_tokens"] == reference.sequence_lengths.sum()
        assert (described["tokenizer"], described["text_bytes"], described["dtype"]) == (
            None,
            None,
            "uint16",
        )
    sha256 = identity(workspace, "mixed")["sha256"]
    assert sha256 == read_manifest(workspace / "mixed")["sha256"]
    with pytest.raises(UserError, match="vocab_size is 9, but 400 in"):
        manifest = {**read_manifest(shards[1]), "vocab_size": 9}
        write_manifest(manifest_path(shards[1]), manifest)
        merge([foreign, *shards], output=workspace / "new")
    capsys.readouterr()
    with pytest.raises(UserError, match="datasets of other programs have no sources file"):
        trace(workspace / "mixed", 0)


def rewrite_as_floats(prefix: Path, dtype: type, code: int, *, add: float = 0.0) -> None:
    """Convert a dataset of uint16 tokens to floating-point tokens with a dtype code."""
    tokens = np.fromfile(f"{prefix}.bin", np.uint16).astype(np.float64)
    (tokens + add).astype(dtype).tofile(f"{prefix}.bin")
    content = bytearray(Path(f"{prefix}.idx").read_bytes())
    content[17] = code
    count = struct.unpack_from("<Q", content, 18)[0]
    pointers = np.frombuffer(content, "<i8", count, 34 + 4 * count)
    pointers *= np.dtype(dtype).itemsize // 2
    Path(f"{prefix}.idx").write_bytes(content)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("code", [6, 7])
def test_floating_point_tokens_become_integers(
    tmp_path: Path, others: list[Path], dtype: type, code: int
) -> None:
    expected = megatron_merge(others, tmp_path / "megatron", np.uint16)
    for prefix in others:
        rewrite_as_floats(prefix, dtype, code)
    merge(others, output=tmp_path / "merged")
    assert_same_dataset(tmp_path / "merged", expected)
    assert find_fault(tmp_path / "merged") is None


def test_floating_point_tokens_take_the_type_of_the_other_inputs(
    tmp_path: Path, others: list[Path]
) -> None:
    rewrite_as_floats(others[0], np.float32, 7)
    merge(others, output=tmp_path / "merged")
    assert MegatronDataset(str(tmp_path / "merged")).index.dtype == np.uint16
    rewrite_as_floats(others[2], np.float64, 6, add=65_490)  # the highest is 65,499
    merge([others[0], others[2]], output=tmp_path / "high")
    merged = MegatronDataset(str(tmp_path / "high"))
    assert merged.index.dtype == np.int32
    assert merged[len(merged) - 1].tolist() == [65_499]
    rewrite_as_floats(build(others[2], MERGE_INPUTS[2]), np.float64, 6, add=65_536)
    with pytest.raises(UserError, match=r"p2\.bin: token 65545 does not fit in uint16"):
        merge(others, output=tmp_path / "none")


@pytest.mark.parametrize("add", [0.5, -7.0, np.nan, np.inf, 2.0**31])
def test_numbers_that_are_not_tokens_are_refused(
    tmp_path: Path, others: list[Path], add: float
) -> None:
    rewrite_as_floats(others[2], np.float64, 6, add=add)
    with pytest.raises(UserError, match=r"p2\.bin: number 0 is .*, not a token"):
        merge(others, output=tmp_path / "none")
    assert not list(tmp_path.glob("*none*"))


def write_tntidx(prefix: Path, documents: list[list[list[int]]], dimensions: int = 1) -> Path:
    """Write a dataset as --dataset-impl cached or lazy did."""
    sentences = [sentence for document in documents for sentence in document]
    sizes = [len(sentence) for sentence in sentences]
    flat = [token for sentence in sentences for token in sentence]
    np.array(flat, np.int32).tofile(f"{prefix}.bin")
    bounds = np.cumsum([0, *map(len, documents)])
    with open(f"{prefix}.idx", "wb") as stream:
        stream.write(b"TNTIDX\0\0" + struct.pack("<QQQ", 1, 4, 4))
        stream.write(struct.pack("<QQQ", len(sizes), dimensions * len(sizes), len(bounds)))
        for column in (
            dimensions * np.arange(len(sizes) + 1),
            np.cumsum([0, *sizes]),
            np.repeat(sizes, dimensions),
            bounds,
        ):
            stream.write(column.astype("<i8").tobytes())
    return prefix


def test_cached_and_lazy_indexes_are_converted(tmp_path: Path) -> None:
    documents = [[[1, 2], [3]], [], [[4, 5, 70_000]]]
    lazy = write_tntidx(tmp_path / "lazy", documents)
    same = build(tmp_path / "same", [[1, 2, 3], []], np.int32)
    builder = IndexedDatasetBuilder(f"{tmp_path / 'megatron'}.bin", dtype=np.int32)
    for document in documents:
        tokens = [token for sentence in document for token in sentence]
        builder.add_document(tensor(tokens), [len(sentence) for sentence in document])
    builder.add_index(str(same))
    builder.finalize(f"{tmp_path / 'megatron'}.idx")
    merge([lazy, same], output=tmp_path / "merged")
    assert_same_dataset(tmp_path / "merged", tmp_path / "megatron")
    write_tntidx(tmp_path / "lazy", documents, dimensions=2)
    with pytest.raises(UserError, match=r"lazy\.idx: its arrays have more than one dimension"):
        merge([lazy], output=tmp_path / "none")
    Path(f"{lazy}.idx").write_bytes(Path(f"{lazy}.idx").read_bytes()[:-1])
    with pytest.raises(
        UserError, match=r"lazy\.idx: version 1, .* bytes; expected version 1 and, by its header"
    ):
        merge([lazy], output=tmp_path / "none")
    assert not list(tmp_path.glob("*none*"))


def number(offset: int, value: int, kind: str) -> Callable[[Path], None]:
    """Damage: another number in an index."""
    return lambda prefix: overwrite(Path(f"{prefix}.idx"), offset, value, kind)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        # p0 has lengths 2, 1, 1 from byte 34, pointers from 46, bounds 0, 2, 2, 3 from 70.
        (number(34, 1, "<i"), r"bin: 8 bytes, but its index counts 6"),
        (number(54, 2, "<q"), "sequence 1 begins at 2, but 4 follows"),
        (number(70, 1, "<q"), "bounds do not ascend from 0 to 3"),
        (number(78, 3, "<q"), "bounds do not ascend from 0 to 3"),
        (number(94, 4, "<q"), "bounds do not ascend from 0 to 3"),
        (number(17, 9, "<B"), "dtype code 9 is not a known token"),
        (number(18, 4, "<Q"), "its header says"),
        (lambda prefix: Path(f"{prefix}.bin").unlink(), r"p0\.bin: no such file"),
        (lambda prefix: build(prefix, [[1]], np.int32), r"dtype is int32, but uint16 in .*p2"),
    ],
)
def test_errors_name_damaged_datasets_of_other_programs(
    tmp_path: Path, others: list[Path], damage: Callable[[Path], object], message: str
) -> None:
    damage(others[0])
    with pytest.raises(UserError, match=message) as raised:
        merge([others[2], others[0]], output=tmp_path / "none")
    assert "in/p0" in str(raised.value)
    assert not list(tmp_path.glob("*none*"))


@pytest.mark.parametrize(
    ("limit", "groups"),
    [
        ({"max_tokens": 5}, [(1, 2), (10,)]),
        ({"max_documents": 2}, [(1, 2), (10,)]),
        ({"max_bytes": "0.01kB"}, [(1, 2), (10,)]),
        ({"max_tokens": 1}, [(1,), (2,), (10,)]),
        ({"max_bytes": "5 GB"}, [(1, 2, 10)]),
    ],
)
def test_datasets_of_a_folder_are_merged_in_natural_order(
    tmp_path: Path, limit: dict[str, int], groups: list[tuple[int, ...]]
) -> None:
    folder = tmp_path / "in"
    for number in (10, 2, 1):
        build(folder / f"p{number}", [[number] * 2 if number > 1 else [1] * 3])
    (folder / ".p3.idx.tmp-host-1").touch()
    merge([folder], output=tmp_path / "out/m", **limit)  # type: ignore[arg-type]
    assert sorted(path.name for path in (tmp_path / "out").glob("*.bin")) == [
        f"m-000{number}.bin" for number in range(len(groups))
    ]
    for number, group in enumerate(groups):
        prefixes = [folder / f"p{member}" for member in group]
        expected = megatron_merge(prefixes, tmp_path / f"megatron{number}", np.uint16)
        assert_same_dataset(tmp_path / f"out/m-000{number}", expected)


def test_invalid_names_and_limits_are_refused(tmp_path: Path, others: list[Path]) -> None:
    out = tmp_path / "out"
    with pytest.raises(UserError, match="--max-bytes and --max-tokens: give one"):
        merge(others, output=out, max_bytes="1MB", max_tokens=7)
    with pytest.raises(UserError, match="'5 apples' is not a size"):
        merge(others, output=out, max_bytes="5 apples")
    with pytest.raises(UserError, match="--max-documents: 0: give 1 or more"):
        merge(others, output=out, max_documents=0)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="empty: no dataset in this folder"):
        merge([tmp_path / "empty"], output=out)
    Path(f"{others[1]}.idx").unlink()
    with pytest.raises(UserError, match=r"p1\.idx: no such file, but the other file"):
        merge([tmp_path / "in"], output=out)
    merge([Path(f"{others[0]}.bin"), others[2]], output=out, max_documents=1)
    assert (tmp_path / "out-0001.bin").exists()
    with pytest.raises(UserError, match="out-0001: left by an earlier merge"):
        merge([others[0], others[2]], output=out, max_documents=9)
