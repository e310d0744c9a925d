"""Read and write indexed datasets as megatron-core does; refuse damaged ones."""

from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets import indexed_dataset as megatron

from tests.support.megatron_datasets import assert_same_dataset, write_dataset
from tokamake.data.indexed.dataset import DatasetWriter, IndexedDataset, token_dtype
from tokamake.errors import UserError

DOCUMENTS = [[1, 2, 3], [], [4], [65_499, 0, 7, 8]]


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.uint16, np.int32, np.int64])
def test_a_written_dataset_has_the_bytes_of_megatron(
    tmp_path: Path, dtype: type[np.integer]
) -> None:
    documents = [np.array(document).astype(dtype) for document in DOCUMENTS]
    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "megatron.bin"), dtype=dtype)
    for document in documents:
        builder.add_document(torch.tensor(document.tolist()), [len(document)])
    builder.finalize(str(tmp_path / "megatron.idx"))
    with DatasetWriter(tmp_path / "data.v1.bin", tmp_path / "data.v1.idx", dtype=dtype) as writer:
        for batch in (documents[:3], documents[3:]):
            writer.add(np.concatenate(batch), np.array([*map(len, batch)], np.int32))
    assert_same_dataset(tmp_path / "data.v1", tmp_path / "megatron")
    dataset = IndexedDataset(tmp_path / "data.v1")
    assert dataset.dtype == dtype
    read = [dataset[number].tolist() for number in range(len(dataset))]
    assert read == [document.tolist() for document in documents]


def test_reads_documents_of_several_sequences(tmp_path: Path) -> None:
    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "data.bin"), dtype=np.int32)
    builder.add_document(torch.arange(5), [2, 3])
    builder.add_document(torch.arange(0), [])
    builder.finalize(str(tmp_path / "data.idx"))
    dataset = IndexedDataset(tmp_path / "data")
    assert dataset.document_bounds.tolist() == [0, 2, 2]
    assert dataset.lengths.tolist() == [2, 3]


def test_reads_an_empty_dataset(tmp_path: Path) -> None:
    dataset = IndexedDataset(write_dataset(tmp_path / "data", []))
    assert len(dataset) == 0
    assert dataset.document_bounds.tolist() == [0]


def test_an_error_leaves_no_valid_index(tmp_path: Path) -> None:
    def fail_while_writing() -> None:
        with DatasetWriter(tmp_path / "data.bin", tmp_path / "data.idx", dtype=np.int32):
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_while_writing()
    with pytest.raises(UserError, match="not a Megatron index"):
        IndexedDataset(tmp_path / "data")


@pytest.mark.parametrize("vocab_size", [1, 65_499, 65_500, 65_536, 200_000])
def test_token_dtype_is_that_of_megatron(vocab_size: int) -> None:
    assert token_dtype(vocab_size) == megatron.DType.optimal_dtype(vocab_size)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
@pytest.mark.parametrize("change", ["missing", "empty", "shorter", "longer"])
def test_a_damaged_file_is_a_user_error(tmp_path: Path, suffix: str, change: str) -> None:
    path = write_dataset(tmp_path / "data", [3, 4]).with_suffix(suffix)
    content = path.read_bytes()
    path.unlink()
    if change != "missing":
        path.write_bytes({"empty": b"", "shorter": content[:-1], "longer": content + b"\0"}[change])
    with pytest.raises(UserError, match=str(path)):
        IndexedDataset(tmp_path / "data")


@pytest.mark.parametrize(("offset", "value"), [(0, 0), (9, 2), (17, 6), (18, 9), (26, 255)])
def test_a_damaged_header_is_a_user_error(tmp_path: Path, offset: int, value: int) -> None:
    path = write_dataset(tmp_path / "data", [3, 4]).with_suffix(".idx")
    damaged = bytearray(path.read_bytes())
    damaged[offset] = value
    path.write_bytes(damaged)
    with pytest.raises(UserError, match=str(path)):
        IndexedDataset(tmp_path / "data")


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (b"TNTIDX\0\0", r"\(TNTIDX\); `tokamake merge` converts it"),
        (b"MMIDIDX\0\0\1\0\0\0\0\0\0\0\6", "code 6 .*`tokamake merge` converts floating-point"),
    ],
)
def test_errors_name_what_merge_converts(tmp_path: Path, head: bytes, message: str) -> None:
    path = write_dataset(tmp_path / "data", [3, 4]).with_suffix(".idx")
    path.write_bytes(head + path.read_bytes()[len(head) :])
    with pytest.raises(UserError, match=message):
        IndexedDataset(tmp_path / "data")
