"""Pairs written here and read by megatron-core, the other way round, and damaged ones."""

from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets import indexed_dataset as megatron

from tests.support.megatron_datasets import write_pair
from tokamake.data.indexed.dataset import DatasetWriter, IndexedDataset, token_dtype
from tokamake.errors import UserError

DOCUMENTS = [[1, 2, 3], [], [4], [65_499, 0, 7, 8]]


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.uint16, np.int32, np.int64])
def test_megatron_reads_what_we_write(tmp_path: Path, dtype: type[np.integer]) -> None:
    documents = [np.array(document).astype(dtype) for document in DOCUMENTS]
    with DatasetWriter(tmp_path / "pair.v1.bin", tmp_path / "pair.v1.idx", dtype) as writer:
        for batch in (documents[:3], documents[3:]):
            writer.add(np.concatenate(batch), np.array([len(one) for one in batch], np.int32))
    theirs = megatron.IndexedDataset(str(tmp_path / "pair.v1"))
    assert theirs.index.dtype == dtype
    assert len(theirs) == len(documents)
    assert theirs.document_indices.tolist() == [0, 1, 2, 3, 4]
    ours = IndexedDataset(tmp_path / "pair.v1")
    for number, document in enumerate(documents):
        assert theirs.get(number).tolist() == document.tolist()
        assert ours[number].tolist() == document.tolist()


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_we_read_and_write_the_bytes_of_megatron(tmp_path: Path, dtype: type[np.integer]) -> None:
    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=dtype)
    for document in DOCUMENTS:
        builder.add_document(torch.tensor(document), [len(document)])
    builder.finalize(str(tmp_path / "theirs.idx"))
    theirs = IndexedDataset(tmp_path / "theirs")
    assert theirs.dtype == dtype
    assert [theirs[number].tolist() for number in range(len(theirs))] == DOCUMENTS
    with DatasetWriter(tmp_path / "ours.bin", tmp_path / "ours.idx", dtype) as writer:
        tokens = np.concatenate(DOCUMENTS)
        writer.add(tokens, np.array([len(document) for document in DOCUMENTS], np.int32))
    for suffix in (".bin", ".idx"):
        ours = (tmp_path / "ours").with_suffix(suffix).read_bytes()
        assert ours == (tmp_path / "theirs").with_suffix(suffix).read_bytes()


def test_documents_of_several_sequences(tmp_path: Path) -> None:
    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "pair.bin"), dtype=np.int32)
    builder.add_document(torch.arange(5), [2, 3])
    builder.add_document(torch.arange(0), [])
    builder.finalize(str(tmp_path / "pair.idx"))
    ours = IndexedDataset(tmp_path / "pair")
    assert ours.document_bounds.tolist() == [0, 2, 2]
    assert ours.lengths.tolist() == [2, 3]


def test_an_empty_pair(tmp_path: Path) -> None:
    ours = IndexedDataset(write_pair(tmp_path / "pair", []))
    assert len(ours) == 0
    assert ours.document_bounds.tolist() == [0]


def test_no_index_after_an_error(tmp_path: Path) -> None:
    def broken() -> None:
        with DatasetWriter(tmp_path / "pair.bin", tmp_path / "pair.idx", np.int32):
            raise RuntimeError

    with pytest.raises(RuntimeError):
        broken()
    with pytest.raises(UserError, match="not a Megatron index"):
        IndexedDataset(tmp_path / "pair")


@pytest.mark.parametrize("vocabulary", [1, 65_499, 65_500, 65_536, 200_000])
def test_token_dtype_is_that_of_megatron(vocabulary: int) -> None:
    assert token_dtype(vocabulary) == megatron.DType.optimal_dtype(vocabulary)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
@pytest.mark.parametrize("change", ["missing", "empty", "shorter", "longer"])
def test_a_damaged_file_is_a_user_error(tmp_path: Path, suffix: str, change: str) -> None:
    path = write_pair(tmp_path / "pair", [3, 4]).with_suffix(suffix)
    whole = path.read_bytes()
    path.unlink()
    if change != "missing":
        path.write_bytes({"empty": b"", "shorter": whole[:-1], "longer": whole + b"\0"}[change])
    with pytest.raises(UserError, match=str(path)):
        IndexedDataset(tmp_path / "pair")


@pytest.mark.parametrize(("offset", "value"), [(0, 0), (9, 2), (17, 6), (18, 9), (26, 255)])
def test_a_damaged_header_is_a_user_error(tmp_path: Path, offset: int, value: int) -> None:
    path = write_pair(tmp_path / "pair", [3, 4]).with_suffix(".idx")
    damaged = bytearray(path.read_bytes())
    damaged[offset] = value
    path.write_bytes(damaged)
    with pytest.raises(UserError, match=str(path)):
        IndexedDataset(tmp_path / "pair")


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (b"TNTIDX\0\0", r"\(TNTIDX\); `tokamake merge` converts it"),
        (b"MMIDIDX\0\0\1\0\0\0\0\0\0\0\6", "code 6 .*`tokamake merge` converts floating-point"),
    ],
)
def test_what_merge_converts_is_said(tmp_path: Path, head: bytes, message: str) -> None:
    path = write_pair(tmp_path / "pair", [3, 4]).with_suffix(".idx")
    path.write_bytes(head + path.read_bytes()[len(head) :])
    with pytest.raises(UserError, match=message):
        IndexedDataset(tmp_path / "pair")
