"""Searches: exact ones equal torch.topk, approximate ones find most of the same."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.embeddings import random_vectors, write_embeddings
from tests.support.faults import Inject
from tests.support.paths import SUPPORT
from tests.support.peak_memory import peak_of
from tokamake.errors import UserError
from tokamake.retrieval.found import Found, read_found
from tokamake.retrieval.index_blocks import index_blocks
from tokamake.retrieval.search import search
from tokamake.retrieval.top_k import TopK

FAISS = pytest.mark.extra("retrieval", "faiss")
DIMENSION, NUMBER, FIRST_ID = 16, 3000, 70
VECTORS = random_vectors(NUMBER, dimension=DIMENSION)
QUERIES = random_vectors(300, dimension=DIMENSION, seed=1).astype(np.float16)


@pytest.fixture
def embeddings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder has embeddings in three shards, and queries."""
    monkeypatch.chdir(tmp_path)
    np.save("queries.npy", QUERIES)
    return write_embeddings(Path("embeddings"), VECTORS, shards=3, first_id=FIRST_ID, model="m")


def found_by(**options: Any) -> Found:
    arguments = {"queries": Path("queries.npy"), "output": Path("found.json"), **options}
    search(**arguments)
    found, _ = read_found(arguments["output"])
    return found


def expected(k: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids and scores by torch."""
    vectors = torch.from_numpy(VECTORS).half().float()
    scores, positions = torch.topk(torch.from_numpy(QUERIES).float() @ vectors.T, k)
    return positions.numpy() + FIRST_ID, scores.numpy()


@pytest.mark.parametrize("k", [1, 20])
def test_a_search_without_an_index_equals_topk(
    embeddings: Path, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokamake.retrieval.top_k._ROWS", 700)
    found = found_by(embeddings=embeddings, top_k=k)
    ids, scores = expected(k)
    np.testing.assert_array_equal(found.queries, np.arange(300))
    np.testing.assert_array_equal(found.ids, ids)
    np.testing.assert_allclose(found.scores, scores, rtol=1e-5, atol=1e-5)


def test_the_order_of_all_vectors_is_exact(
    embeddings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokamake.retrieval.top_k._ROWS", 700)
    vectors, queries = np.rint(VECTORS * 100), np.rint(QUERIES[:50] * 100)  # sums have no rounding
    np.save("queries.npy", queries)
    found = found_by(embeddings=write_embeddings(Path("whole"), vectors), top_k=NUMBER)
    scores = torch.from_numpy(queries.astype(np.float32)) @ torch.from_numpy(vectors).T
    np.testing.assert_array_equal(found.scores, torch.topk(scores, NUMBER).values)
    order = torch.sort(scores, dim=1, descending=True, stable=True).indices
    np.testing.assert_array_equal(found.ids, order)


@FAISS
def test_faiss_gpu_searches_a_copy_of_the_index(
    embeddings: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stand-in for faiss-gpu: no GPU is needed, and none proves it."""
    import faiss

    copied, first = list[int](), np.empty(0)

    def copy(index: Any) -> Any:
        lists = faiss.try_extract_index_ivf(index)
        if lists is None:
            raise RuntimeError("Error in f at g:1: This index type is not implemented on GPU.")
        copied.append(lists.nprobe)
        return faiss.clone_index(index)

    monkeypatch.setattr(faiss, "index_cpu_to_all_gpus", copy)
    for factory, nprobe, k, num_gpus, note in (
        ("IVF8,Flat", 4, 9, 0, ""),
        ("IVF8,Flat", 4, 9, 2, "searches on 2 GPUs\n"),
        ("IVF8,Flat", 4, 2049, 2, ""),
        ("HNSW8", 0, 9, 1, "searches without a GPU: FAISS cannot copy the index there (This"),
    ):
        index_blocks(embeddings, output=Path("index.json"), factory=factory)
        monkeypatch.setattr(faiss, "get_num_gpus", lambda number=num_gpus: number)
        copied.clear()
        capsys.readouterr()
        Path("found.json").unlink(missing_ok=True)
        found = found_by(index=Path("index.json"), top_k=k, nprobe=nprobe)
        assert note in (out := capsys.readouterr().out)
        assert ("GPU" in out) == bool(note)
        assert copied == [nprobe] * ("2 GPUs" in note)
        if "2 GPUs" in note:
            np.testing.assert_array_equal(found.ids, first)
        first = found.ids


def test_shards_do_not_change_a_search(embeddings: Path) -> None:
    whole = write_embeddings(Path("whole"), VECTORS, first_id=FIRST_ID)
    found_by(embeddings=embeddings, top_k=9)
    found_by(embeddings=whole, top_k=9, output=Path("whole.json"))
    for suffix in (".ids.npy", ".scores.npy", ".queries.npy"):
        assert Path(f"found{suffix}").read_bytes() == Path(f"whole{suffix}").read_bytes()


def test_of_equal_scores_the_earlier_vector_is_first(
    embeddings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokamake.retrieval.top_k._ROWS", 8)
    vectors = np.random.default_rng(0).integers(-1, 2, (40, 2)).astype(np.float32)
    queries = np.random.default_rng(1).integers(-1, 2, (9, 2)).astype(np.float32)
    np.save("queries.npy", queries)
    found = found_by(embeddings=write_embeddings(Path("ties"), vectors, shards=3), top_k=40)
    order = np.argsort(-(queries @ vectors.T), axis=1, kind="stable")
    np.testing.assert_array_equal(found.ids, order)
    found = found_by(embeddings=Path("ties"), top_k=7)
    np.testing.assert_array_equal(found.ids, order[:, :7])


@FAISS
def test_a_flat_index_finds_the_same(embeddings: Path) -> None:
    index_blocks(embeddings, output=Path("i.json"))
    found = found_by(index=Path("i.json"), embeddings=embeddings, top_k=20)
    ids, scores = expected(20)
    np.testing.assert_array_equal(found.ids, ids)
    np.testing.assert_allclose(found.scores, scores, rtol=1e-5, atol=1e-5)


@FAISS
@pytest.mark.parametrize(
    ("factory", "options", "least"),
    [
        ("IVF16,Flat", {"nprobe": 16}, 1.0),
        ("IVF16,Flat", {"nprobe": 8}, 0.85),
        ("HNSW16", {"ef_search": 200}, 0.97),
        ("IVF16_HNSW8,SQ8", {"nprobe": 16, "ef_search": 32}, 0.95),
        ("IVF16,PQ16x4", {"nprobe": 16}, 0.6),
        pytest.param(
            "OPQ16_16,IVF16_HNSW8,PQ16x4",
            {"nprobe": 16, "ef_search": 32},
            0.6,
            marks=pytest.mark.grid,
        ),
    ],
)
def test_approximate_searches_find_most_of_the_exact_one(
    embeddings: Path, factory: str, options: dict[str, int], least: float
) -> None:
    index_blocks(embeddings, output=Path("i.json"), factory=factory)
    found = found_by(index=Path("i.json"), top_k=20, **options)
    ids, _ = expected(20)
    recall = np.mean([len(np.intersect1d(*pair)) / 20 for pair in zip(found.ids, ids, strict=True)])
    assert recall >= least
    np.testing.assert_array_equal(found.scores, -np.sort(-found.scores, axis=1))


@FAISS
def test_workers_do_not_change_a_search(embeddings: Path) -> None:
    index_blocks(embeddings, output=Path("i.json"), factory="IVF16,Flat")
    for workers in (1, 3):
        output = Path(f"{workers}.json")
        found_by(index=Path("i.json"), output=output, nprobe=4, workers=workers)
    for suffix in (".ids.npy", ".scores.npy"):
        assert Path(f"1{suffix}").read_bytes() == Path(f"3{suffix}").read_bytes()


@FAISS
def test_a_list_that_is_short_ends_with_minus_one(
    embeddings: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index_blocks(embeddings, output=Path("i.json"), factory="IVF64,Flat")
    found = found_by(index=Path("i.json"), top_k=500)
    assert "300 found fewer: raise --nprobe or --ef-search" in capsys.readouterr().out
    assert (found.ids[:, -1] == -1).all()
    np.testing.assert_array_equal(found.scores == -np.inf, found.ids == -1)


def test_memory_does_not_grow_with_the_corpus(embeddings: Path) -> None:
    large = 300_000
    write_embeddings(Path("large"), random_vectors(large, dimension=DIMENSION), shards=2)
    arguments = ["search", "--queries=queries.npy", "--top-k=5"]
    small_peak, large_peak = (
        peak_of(*arguments, f"--embeddings={folder}", f"--output={folder}.json")
        for folder in (embeddings, "large")
    )
    # Mapped pages, and ids twice: once to see that they differ. All scores would be 360 MB.
    assert large_peak - small_peak < large * (DIMENSION * 2 + 3 * 8) + 20e6


def test_queries_of_embeddings_keep_their_ids(embeddings: Path) -> None:
    vectors = QUERIES.astype(np.float32)
    folder = write_embeddings(Path("asked"), vectors, shards=2, first_id=5, model="m")
    found = found_by(queries=folder, embeddings=embeddings, top_k=3)
    np.testing.assert_array_equal(found.queries, np.arange(5, 305))
    np.testing.assert_array_equal(found.ids, expected(3)[0])


def test_a_complete_search_is_not_repeated(
    embeddings: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for k, said in [(5, "5 for each of 300 queries"), (5, "already complete"), (6, "6 for each")]:
        found_by(embeddings=embeddings, top_k=k)
        assert said in capsys.readouterr().out


@pytest.mark.fault("kill of a stage")
def test_a_kill_leaves_no_half_result_and_a_rerun_gives_the_same_bytes(
    embeddings: Path, inject: Inject
) -> None:
    found_by(embeddings=embeddings, top_k=7)
    names = [f"found{suffix}" for suffix in (".json", ".ids.npy", ".scores.npy", ".queries.npy")]
    expected = {name: Path(name).read_bytes() for name in names}
    options = ["--queries=queries.npy", f"--embeddings={embeddings}", "--top-k=7"]
    command = [sys.executable, SUPPORT / "faulty.py"]
    for operation in (2, 6, 9, 12):  # unlink, fsync, the first and the last rename
        inject()
        arguments = [*command, str(operation), "search", *options, "--output=out/found.json"]
        done = subprocess.run(arguments, capture_output=True, check=False)
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert not Path("out/found.json").exists()
    found_by(embeddings=embeddings, top_k=7, output=Path("out/found.json"))
    assert {path.name: path.read_bytes() for path in Path("out").iterdir()} == expected


def query_of(vectors: np.ndarray) -> Path:
    np.save("wrong.npy", vectors)
    return Path("wrong.npy")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "--index and --embeddings: neither is given"),
        ({"embeddings": Path("embeddings"), "top_k": 3001}, "3001 for the 3,000 vectors of embed"),
        ({"embeddings": Path("embeddings"), "top_k": 0}, "--top-k: 0 for the 3,000"),
        ({"embeddings": Path("embeddings"), "nprobe": 3}, "--nprobe: without --index, the search"),
        (
            {"embeddings": Path("embeddings"), "workers": -2},
            "--workers: -2 is negative; give a pos",
        ),
        ({"embeddings": Path("gone")}, "gone: not a folder; give a folder of embeddings"),
        ({"index": Path("gone.json")}, "gone.json: no such file; build it with `tokamake index-"),
        ({"queries": Path("gone.npy")}, "gone.npy: no such file; give a folder"),
        ({"queries": Path("embeddings/e-0.json")}, r"not a .npy file \(.*\); write it with"),
        ({"output": Path("found")}, "found: does not end with .json"),
        (
            {"embeddings": Path("embeddings"), "output": Path("embeddings/s.json")},
            "--output: embeddings/s.json lies in embeddings, which has only embeddings; name",
        ),
        (
            {"queries": Path("embeddings"), "output": Path("e/../embeddings/s.json")},
            "s.json lies in embeddings, which has only",
        ),
        ({"index": Path("i.json"), "output": Path("i.json")}, "i.json is the index; name another"),
    ],
)
def test_mistakes_are_one_line(embeddings: Path, options: dict[str, Any], message: str) -> None:
    if "queries" in options:
        options = {"embeddings": embeddings, **options}
    with pytest.raises(UserError, match=message) as error:
        found_by(**options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("vectors", "message"),
    [
        (QUERIES[:, :8], "wrong.npy has vectors of dimension 8, but embeddings of 16; embed both"),
        (QUERIES[0], r"wrong.npy: float16 of shape \(16,\); give vectors \(n, d\) of a float type"),
        (np.ones((2, 16), int), r"wrong.npy: int64 of shape"),
        (QUERIES[:0], r"wrong.npy: float16 of shape \(0, 16\)"),
        (np.full((2, 16), [[1], [np.nan]]), "wrong.npy: row 1 is not finite; fix the vector"),
    ],
)
def test_wrong_queries_are_named(embeddings: Path, vectors: np.ndarray, message: str) -> None:
    with pytest.raises(UserError, match=message):
        found_by(queries=query_of(vectors), embeddings=embeddings, top_k=3)


def test_scores_of_the_largest_queries_are_finite(tmp_path: Path) -> None:
    np.save(tmp_path / "queries.npy", np.full((1, 16), 2.0**96, np.float32))
    vectors = np.full((3, 16), 65504, np.float32) * [[1], [-1], [0.5]]
    folder = write_embeddings(tmp_path / "large", vectors.astype(np.float32))
    output = tmp_path / "found.json"
    found = found_by(queries=tmp_path / "queries.npy", embeddings=folder, output=output, top_k=3)
    assert found.ids.tolist() == [[0, 2, 1]]
    assert np.isfinite(found.scores).all()


def test_a_position_that_was_not_found_has_no_id() -> None:
    top = TopK(1, 3)
    top.update(np.array([[1, np.nan, 2]], np.float32), queries=slice(0, 1), start=0)
    assert top.ids(np.array([7, 8, 9])).tolist() == [[9, 7, -1]]


def test_queries_of_another_model_are_refused(embeddings: Path) -> None:
    folder = write_embeddings(Path("asked"), VECTORS[:2], model="n")
    with pytest.raises(UserError, match=r"asked was embedded by the model n, but embeddings by m"):
        found_by(queries=folder, embeddings=embeddings, top_k=3)


@FAISS
def test_an_index_of_other_embeddings_is_refused(embeddings: Path) -> None:
    index_blocks(embeddings, output=Path("i.json"))
    other = write_embeddings(Path("other"), VECTORS + 1, shards=3)
    with pytest.raises(UserError, match=r"--index: i.json has other embeddings than other; build"):
        found_by(index=Path("i.json"), embeddings=other, top_k=3)


@FAISS
def test_a_parameter_of_another_index_is_refused(embeddings: Path) -> None:
    index_blocks(embeddings, output=Path("i.json"))
    with pytest.raises(UserError, match=r"--nprobe: an index Flat has no nprobe; leave the option"):
        found_by(index=Path("i.json"), top_k=3, nprobe=4)
    with pytest.raises(UserError, match=r"--ef-search: an index Flat has no efSearch"):
        found_by(index=Path("i.json"), top_k=3, ef_search=4)


@FAISS
def test_without_faiss_the_command_that_installs_it_is_named(
    embeddings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index_blocks(embeddings, output=Path("i.json"))
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(UserError, match=r"^faiss is not installed; pip install"):
        found_by(index=Path("i.json"), top_k=3)
