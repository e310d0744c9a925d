"""The index folder: index.json, whether it is complete, and the datasets that it was made from."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.megatron_datasets import MERGE_INPUTS, write_megatron_dataset
from tokamake import files
from tokamake.data.indexed.merge import merge
from tokamake.data.samples.index_folder import (
    ARRAYS,
    VERSION,
    ArrayFile,
    existing_splits,
    identity,
    is_complete,
    matches,
    read_index,
    sizes,
    write_arrays,
)
from tokamake.data.samples.sample_index import DatasetIndex
from tokamake.errors import UserError


def write_index(folder: Path, **changes: Any) -> dict[str, Any]:
    """Write index.json of a split with one file."""
    (folder / "train").mkdir(exist_ok=True)
    (folder / "train/dataset_index.npy").write_bytes(b"12345")
    content = {"version": VERSION, "request": "abc", "bytes": {"train/dataset_index.npy": 5}}
    content |= changes
    description = {**content, "digest": files.digest(content)}
    files.write_json(folder / "index.json", description)
    return description


def test_an_index_is_read_as_it_was_written(tmp_path: Path) -> None:
    description = write_index(tmp_path)
    assert read_index(tmp_path) == description


def test_a_changed_index_or_another_version_is_refused(tmp_path: Path) -> None:
    description = write_index(tmp_path)
    files.write_json(tmp_path / "index.json", {**description, "request": "abd"})
    with pytest.raises(UserError, match=r"index\.json: does not match its own digest; run"):
        read_index(tmp_path)
    write_index(tmp_path, version=VERSION + 1)
    with pytest.raises(UserError, match=rf"index\.json: not an index of version {VERSION}; run"):
        read_index(tmp_path)
    files.write_json(tmp_path / "index.json", [])
    with pytest.raises(UserError, match="not an index of version"):
        read_index(tmp_path)


def test_an_index_is_complete_with_all_files_in_full_size(tmp_path: Path) -> None:
    assert not is_complete(tmp_path, "abc")
    write_index(tmp_path)
    assert is_complete(tmp_path, "abc")
    assert not is_complete(tmp_path, "another request")
    (tmp_path / "train/dataset_index.npy").write_bytes(b"1234")
    assert not is_complete(tmp_path, "abc")
    (tmp_path / "train/dataset_index.npy").unlink()
    assert not is_complete(tmp_path, "abc")


def test_splits_and_sizes_are_those_of_files(tmp_path: Path) -> None:
    write_index(tmp_path)
    (tmp_path / "old").mkdir()
    (tmp_path / "old/dataset_index.npy").write_bytes(b"1")
    (tmp_path / "empty").mkdir()
    assert sorted(existing_splits(tmp_path)) == ["old", "train"]
    assert {name: size for name, size in sizes(tmp_path).items() if name != "index.json"} == {
        "old/dataset_index.npy": 1,
        "train/dataset_index.npy": 5,
    }


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """An indexed dataset with a manifest."""
    write_megatron_dataset(tmp_path / "shard", MERGE_INPUTS[0])
    merge([tmp_path / "shard"], output=tmp_path / "data")
    return tmp_path / "data"


def test_the_identity_of_a_dataset_is_its_sizes_and_hashes(dataset: Path) -> None:
    measured = identity(dataset.parent, "data")
    assert measured["bytes"] == {
        kind: dataset.with_suffix(f".{kind}").stat().st_size for kind in ("bin", "idx")
    }
    for kind in ("bin", "idx"):
        assert measured["sha256"][kind] == files.sha256(dataset.with_suffix(f".{kind}"))
    assert identity(dataset.parent, "data", thorough=True) == measured


def test_files_that_do_not_match_the_manifest_are_refused(dataset: Path) -> None:
    content = bytearray(dataset.with_suffix(".idx").read_bytes())
    content[-1] ^= 1
    dataset.with_suffix(".idx").write_bytes(content)
    assert identity(dataset.parent, "data")
    with pytest.raises(UserError, match="data: files do not match the manifest; write the dataset"):
        identity(dataset.parent, "data", thorough=True)
    with dataset.with_suffix(".bin").open("ab") as stream:
        stream.write(b"x")
    with pytest.raises(UserError, match="data: files do not match the manifest"):
        identity(dataset.parent, "data")


def test_a_dataset_without_a_manifest_is_hashed(tmp_path: Path) -> None:
    write_megatron_dataset(tmp_path / "shard", MERGE_INPUTS[0])
    measured = identity(tmp_path, "shard")
    assert measured["sha256"] == {"idx": files.sha256(tmp_path / "shard.idx")}
    thorough = identity(tmp_path, "shard", thorough=True)
    assert thorough == {**measured, "content": files.sha256(tmp_path / "shard.bin")}
    # The index may hold more than what is measured, and not less.
    assert matches(thorough, measured)
    assert not matches(measured, thorough)


def test_a_missing_dataset_names_its_prefix_and_root(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        identity(tmp_path, "none")
    assert str(caught.value) == (
        f"{tmp_path}/none.bin: no such file; check the prefix, and the data root {tmp_path}"
    )


INDEXES = [
    DatasetIndex(
        np.arange(5, dtype=np.int32),
        np.arange(8, dtype=dtype).reshape(4, 2) + 2**16,
        np.array([2, 0, 1], np.uint32),
    )
    for dtype in (np.int32, np.int64)
] + [DatasetIndex(np.zeros(0, np.int32), np.zeros((0, 2), np.int32), np.zeros(0, np.uint32))]


def write(folder: Path) -> list[dict[str, list[object]]]:
    with (folder / ARRAYS).open("wb") as stream:
        return [write_arrays(stream, index._asdict()) for index in INDEXES]


def test_arrays_are_read_as_they_were_written(tmp_path: Path) -> None:
    locations = write(tmp_path)
    arrays = ArrayFile(tmp_path)
    for index, places in zip(INDEXES, locations, strict=True):
        for name, array in arrays.index(places, DatasetIndex)._asdict().items():
            expected = getattr(index, name)
            assert (array == expected).all()
            assert (array.dtype, array.shape) == (expected.dtype, expected.shape)


def test_arrays_begin_at_cache_lines_and_are_little_endian(tmp_path: Path) -> None:
    big = DatasetIndex(*(array.astype(array.dtype.newbyteorder(">")) for array in INDEXES[0]))
    with (tmp_path / ARRAYS).open("wb") as stream:
        stream.write(b"x")
        places = write_arrays(stream, big._asdict())
    assert [place[0] for place in places.values()] == [64, 128, 192]
    assert [place[1] for place in places.values()] == ["<i4", "<i4", "<u4"]
    content = (tmp_path / ARRAYS).read_bytes()
    assert content[64:84] == INDEXES[0].document.astype("<i4").tobytes()


def test_a_missing_or_truncated_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"arrays\.bin: no such file; run `tokamake index` again"):
        ArrayFile(tmp_path)
    locations = write(tmp_path)[:2]
    size = (tmp_path / ARRAYS).stat().st_size
    with (tmp_path / ARRAYS).open("r+b") as stream:
        stream.truncate(size - 100)
    arrays = ArrayFile(tmp_path)
    assert arrays.index(locations[0], DatasetIndex)
    with pytest.raises(UserError, match=r"damaged \(ends before byte \d+\); run `tokamake index`"):
        arrays.index(locations[1], DatasetIndex)
