"""Indexes: the same bytes from any shards and workers; mistakes are one line."""

import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.embeddings import random_vectors, write_embeddings
from tests.support.faults import Inject
from tests.support.paths import SUPPORT
from tokamake import files
from tokamake.errors import UserError
from tokamake.retrieval.faiss_index import empty_index, write_index
from tokamake.retrieval.index_blocks import index_blocks
from tokamake.retrieval.products import read_product

FAISS = pytest.mark.extra("retrieval", "faiss")
DIMENSION, NUMBER = 16, 2000
FACTORIES = (
    "Flat",
    "IVF16,Flat",
    "HNSW8",
    "IVF16,PQ4x4",
    pytest.param("OPQ4_8,IVF16_HNSW8,PQ4x4", marks=pytest.mark.grid),
    "PCA8,SQ8",
)


@pytest.fixture
def embeddings(tmp_path: Path) -> Path:
    vectors = random_vectors(NUMBER, dimension=DIMENSION)
    return write_embeddings(tmp_path / "embeddings", vectors, shards=3, model="m")


@FAISS
@pytest.mark.parametrize("factory", FACTORIES)
def test_shards_and_workers_do_not_change_the_bytes(
    tmp_path: Path, embeddings: Path, factory: str
) -> None:
    vectors = random_vectors(NUMBER, dimension=DIMENSION)
    whole = write_embeddings(tmp_path / "whole", vectors)
    hashes = set()
    for number, (folder, workers) in enumerate([(embeddings, 1), (embeddings, 3), (whole, 2)]):
        output = tmp_path / f"{number}.json"
        index_blocks(folder, output=output, factory=factory, workers=workers)
        hashes.add(files.sha256(tmp_path / f"{number}.faiss"))
    assert len(hashes) == 1


@FAISS
def test_blocks_of_additions_do_not_change_the_index(
    tmp_path: Path, embeddings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index_blocks(embeddings, output=tmp_path / "a.json", factory="IVF16,Flat")
    monkeypatch.setattr("tokamake.retrieval.faiss_index._BLOCK_VALUES", 300 * DIMENSION)
    index_blocks(embeddings, output=tmp_path / "b.json", factory="IVF16,Flat")
    assert files.sha256(tmp_path / "a.faiss") == files.sha256(tmp_path / "b.faiss")


@FAISS
def test_the_manifest_says_how_the_index_was_made(tmp_path: Path, embeddings: Path) -> None:
    output = tmp_path / "i.json"
    index_blocks(embeddings, output=output, factory="IVF16,Flat", train_vectors=700, seed=3)
    facts = read_product(output, "an index", remedy="", verify=True)
    assert (facts["factory"], facts["metric"], facts["seed"]) == ("IVF16,Flat", "inner_product", 3)
    assert (facts["train_vectors"], facts["num_vectors"], facts["dimension"]) == (700, 2000, 16)
    assert facts["embeddings"]["made_from"] == {"model": "m"}
    assert len(facts["embeddings"]["shards"]) == 3
    other = tmp_path / "other.json"
    index_blocks(embeddings, output=other, factory="IVF16,Flat", train_vectors=700, seed=4)
    assert files.sha256(tmp_path / "other.faiss") != facts["hashes"][".faiss"]


@FAISS
@pytest.mark.parametrize("factory", ["PQ4x4", "PCA8,PQ4x4"])
def test_the_seed_reaches_product_quantizers(
    tmp_path: Path, embeddings: Path, factory: str
) -> None:
    hashes = set()
    for seed in (1, 1, 2):
        output = tmp_path / f"{len(hashes)}-{seed}.json"
        index_blocks(embeddings, output=output, factory=factory, train_vectors=NUMBER, seed=seed)
        hashes.add(files.sha256(output.with_suffix(".faiss")))
    assert len(hashes) == 2


@FAISS
def test_a_complete_index_is_not_built_again(
    tmp_path: Path, embeddings: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "i.json"
    for factory, said in [
        ("Flat", "2,000 vectors"),
        ("Flat", "already complete"),
        ("HNSW8", "HNSW8"),
    ]:
        index_blocks(embeddings, output=output, factory=factory)
        assert said in capsys.readouterr().out
    (tmp_path / "i.faiss").write_bytes(b"")
    index_blocks(embeddings, output=output, factory="HNSW8")
    assert "already complete" not in capsys.readouterr().out


@FAISS
def test_a_small_sample_is_one_line(
    tmp_path: Path, embeddings: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    index_blocks(embeddings, output=tmp_path / "i.json", factory="IVF64,PQ4x4", train_vectors=200)
    printed = capfd.readouterr()
    assert "trains on 200 vectors; FAISS recommends 2,496 or more" in printed.out
    assert not printed.err


@FAISS
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"factory": "Foo"}, r"'Foo': not an index of FAISS for vectors of dimension 16 \(could "),
        (
            {"factory": "IVF8,Flatt"},
            r"could not parse code description Flatt in IVF8,Flatt\); give",
        ),
        ({"factory": ""}, r"--factory: '': not an index of FAISS"),
        ({"factory": "PQ3"}, r"should be a multiple of the number of subquantizers"),
        ({"factory": "LSH"}, r"--factory: 'LSH': not an index of FAISS"),
        ({"factory": "IDMap,Flat"}, r"IDMap and zeros are not allowed"),
        ({"factory": "IVF0,Flat"}, r"IDMap and zeros are not allowed"),
        (
            {"factory": "IVF4096,Flat"},
            r"4,096 centroids, which need as many.*2,000 of 2,000 are.*few",
        ),
        pytest.param({"factory": "IVF64,PQ4"}, "OK", marks=pytest.mark.grid),
        ({"factory": "IVF64,PQ4", "train_vectors": 255}, r"256 centroids.*255 of.*raise --train-v"),
        ({"factory": "OPQ4,Flat", "train_vectors": 255}, r"256 centroids.*255 of.*raise --train-v"),
        (
            {"factory": "RQ2x12"},
            r"FAISS cannot build RQ2x12 for 2,000 vectors \(Number of training ",
        ),
        ({"train_vectors": -1}, "--train-vectors: -1 is negative"),
        ({"output": Path("i.faiss")}, "i.faiss: does not end with .json"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path, embeddings: Path, options: dict[str, Any], message: str
) -> None:
    arguments = {"output": tmp_path / "i.json", **options}
    if message == "OK":
        index_blocks(embeddings, **arguments)
        return
    with pytest.raises(UserError, match=message) as error:
        index_blocks(embeddings, **arguments)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "i.json").exists()


def test_an_index_among_the_embeddings_is_refused(embeddings: Path) -> None:
    with pytest.raises(UserError, match=r"i.json lies in .*embeddings, which has only embeddings"):
        index_blocks(embeddings, output=embeddings / "i.json")


@FAISS
def test_an_error_of_the_disk_names_the_index_and_the_reason() -> None:
    index = empty_index("Flat", dimension=DIMENSION, seed=1)
    index.add_with_ids(random_vectors(9000, dimension=DIMENSION), np.arange(9000))
    with pytest.raises(OSError, match=r"No space left on device.*i.faiss"):
        write_index(index, Path("/dev/full"), name=Path("i.faiss"))


def test_without_faiss_the_command_that_installs_it_is_named(
    tmp_path: Path, embeddings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(UserError, match=r"^faiss is not installed; pip install 'tokamake\[retr"):
        index_blocks(embeddings, output=tmp_path / "i.json")


@FAISS
@pytest.mark.fault("kill of a stage")
def test_a_kill_leaves_no_half_index_and_a_rerun_gives_the_same_bytes(
    tmp_path: Path, embeddings: Path, inject: Inject
) -> None:
    index_blocks(embeddings, output=tmp_path / "whole.json", factory="IVF16,Flat")
    expected = (tmp_path / "whole.faiss").read_bytes()
    (tmp_path / "out").mkdir()
    output = tmp_path / "out/whole.json"
    arguments = ["index-blocks", embeddings, "--factory=IVF16,Flat", f"--output={output}"]
    faulty = [sys.executable, SUPPORT / "faulty.py"]
    draw = random.Random(5)
    # File operations, and instants of a process that starts within two seconds.
    for when in [*map(str, range(1, 6)), *(f"{draw.uniform(0.5, 3):.3f}" for _ in range(2))]:
        inject()
        done = subprocess.run([*faulty, when, *arguments], capture_output=True, check=False)
        assert done.returncode in (0, -signal.SIGKILL, -signal.SIGALRM), done.stderr
        if output.exists():
            read_product(output, "an index", remedy="", verify=True)
            assert output.with_suffix(".faiss").read_bytes() == expected
    index_blocks(embeddings, output=output, factory="IVF16,Flat")
    assert output.with_suffix(".faiss").read_bytes() == expected
    assert {path.name for path in output.parent.iterdir()} == {"whole.json", "whole.faiss"}
