"""Folders of embeddings: they read back as written, and faults are named."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.embeddings import random_vectors, write_embeddings
from tokamake import files
from tokamake.errors import UserError
from tokamake.retrieval.embeddings import new_shard, open_embeddings


def test_shards_read_back_in_the_order_of_their_names(tmp_path: Path) -> None:
    vectors = random_vectors(25, dimension=6)
    for number, part in enumerate(np.split(np.arange(25), [10, 10, 12])):
        manifest = tmp_path / f"e-{number}.json"
        with new_shard(manifest, dimension=6, made_from={"model": "m", "part": number}) as shard:
            for row in part:
                shard.append([100 + row], vectors[row : row + 1])
    embeddings = open_embeddings(tmp_path, verify=True)
    assert embeddings.dimension == 6
    assert embeddings.num_vectors == 25
    assert embeddings.facts["made_from"] == {"model": "m"}
    np.testing.assert_array_equal(embeddings.ids, np.arange(100, 125))
    expected = vectors.astype(np.float16).astype(np.float32)
    for rows in (1, 7, 25, 100):
        blocks = [*embeddings.blocks(rows)]
        assert max(map(len, blocks)) == min(rows, 25)
        np.testing.assert_array_equal(np.concatenate(blocks), expected)
    positions = np.array([0, 9, 10, 24])
    np.testing.assert_array_equal(embeddings.take(positions), expected[positions])


@pytest.mark.parametrize("name", ["model", "tokenizer"])
def test_shards_of_two_models_are_refused(tmp_path: Path, name: str) -> None:
    for number in range(2):
        made_from = {"model": "m", "tokenizer": "t"} | {name: f"other {number}"}
        vectors = random_vectors(2, dimension=3)
        write_embeddings(tmp_path, vectors, name=f"e{number}", first_id=2 * number, **made_from)
    with pytest.raises(UserError, match=rf"e1-0\.json: made with another {name} than e0-0\.json"):
        open_embeddings(tmp_path)


def test_files_are_plain_arrays_of_numpy(tmp_path: Path) -> None:
    vectors = random_vectors(3, dimension=2)
    write_embeddings(tmp_path, vectors)
    assert {path.name for path in tmp_path.iterdir()} == {"e-0.json", "e-0.npy", "e-0.ids.npy"}
    np.testing.assert_array_equal(np.load(tmp_path / "e-0.npy"), vectors.astype(np.float16))
    np.testing.assert_array_equal(np.load(tmp_path / "e-0.ids.npy"), np.arange(3))
    manifest = json.loads((tmp_path / "e-0.json").read_text())
    assert manifest["num_vectors"] == 3
    assert manifest["hashes"][".npy"] == files.sha256(tmp_path / "e-0.npy")


@pytest.mark.parametrize(
    ("ids", "vectors", "message"),
    [
        ([1, 2], np.ones((2, 3)), r"shape \(2, 3\) for ids of shape \(2,\); give \(n, 4\) for"),
        ([1], np.ones((2, 4)), r"vectors of shape \(2, 4\) for ids of shape \(1,\)"),
        ([7, 7], np.ones((2, 4)), "the id 7 occurs twice; embed each passage once"),
        ([1, 2], np.full((2, 4), [[1.0], [70000.0]]), "id 2 is not finite in fp16.*normalize"),
        ([5], np.full((1, 4), np.nan), "the vector of id 5 is not finite"),
    ],
)
def test_wrong_vectors_are_refused_and_leave_nothing(
    tmp_path: Path, ids: Any, vectors: Any, message: str
) -> None:
    with (
        pytest.raises(UserError, match=message),
        new_shard(tmp_path / "e.json", dimension=4, made_from={}) as shard,
    ):
        shard.append(ids, vectors)
    assert not [*tmp_path.iterdir()]


def test_a_manifest_ends_with_json(tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match=r"e.npy: does not end with .json"),
        new_shard(tmp_path / "e.npy", dimension=4, made_from={}),
    ):
        pass


def cut(folder: Path) -> None:
    (folder / "e-0.npy").write_bytes((folder / "e-0.npy").read_bytes()[:-1])


def change(folder: Path) -> None:
    data = bytearray((folder / "e-1.npy").read_bytes())
    data[-1] ^= 1
    (folder / "e-1.npy").write_bytes(data)


def change_manifest(folder: Path) -> None:
    text = (folder / "e-1.json").read_text()
    (folder / "e-1.json").write_text(text.replace('"num_vectors": 4', '"num_vectors": 3'))


def widen(folder: Path) -> None:
    write_embeddings(folder, random_vectors(2, dimension=5), name="f", first_id=50)


def repeat(folder: Path) -> None:
    write_embeddings(folder, random_vectors(2, dimension=3), name="f", first_id=5)


def retype(folder: Path) -> None:
    """Vectors in fp32, with a manifest that states their true size."""
    facts = files.read_sealed_json(folder / "e-0.json", "")
    np.save(folder / "e-0.npy", np.load(folder / "e-0.npy").astype(np.float32))
    facts["bytes"][".npy"] = (folder / "e-0.npy").stat().st_size
    files.write_sealed_json(folder / "e-0.json", facts)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "e-0.json").unlink(), r"e-0.*npy: has no manifest; embed this"),
        (
            lambda folder: (folder / "e-1.npy").unlink(),
            r"e-1.npy: no such file, but e-1.json names",
        ),
        (lambda folder: (folder / "x.json").write_text("{}"), "x.json: not the manifest of embed"),
        (lambda folder: (folder / "x.json").write_text("?"), "x.json: not valid JSON"),
        (cut, r"e-0.npy: \d+ bytes, its manifest says \d+; embed this shard again"),
        (change, "e-1.npy: differs from the hash in its manifest"),
        (change_manifest, "e-1.json: damaged: does not match its sha256"),
        (widen, r"f-0.json: dimension 5, but e-0.json has 3; embed all shards with one model"),
        (repeat, "the id 5 occurs twice"),
        (retype, r"e-0.npy: float32 of shape \(4, 3\), its manifest says float16 of shape"),
    ],
)
def test_damage_is_named(tmp_path: Path, damage: Any, message: str) -> None:
    write_embeddings(tmp_path, random_vectors(8, dimension=3), shards=2)
    assert open_embeddings(tmp_path, verify=True).ids.size == 8
    damage(tmp_path)
    with pytest.raises(UserError, match=message) as error:
        assert open_embeddings(tmp_path, verify=damage is change).ids.size
    assert "\n" not in str(error.value)


def test_an_empty_folder_and_a_missing_one_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no embeddings; embed passages, blocks or queries there"):
        open_embeddings(tmp_path)
    write_embeddings(tmp_path, np.empty((0, 4), np.float32))
    with pytest.raises(UserError, match="no embeddings"):
        open_embeddings(tmp_path)
    with pytest.raises(UserError, match="gone: not a folder; give a folder of embeddings"):
        open_embeddings(tmp_path / "gone")
