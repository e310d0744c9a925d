"""The index folder: index.json, whether it is complete, and the datasets that it was made from."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.megatron_datasets import MERGE_INPUTS, write_megatron_dataset
from tokamake import files
from tokamake.data.indexed.merge import merge
from tokamake.data.samples.index_folder import (
    VERSION,
    existing_splits,
    identity,
    is_complete,
    matches,
    read_index,
    sizes,
)
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
