"""Neighbors of samples: never of their own documents, and never of documents of other splits."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.support.neighbors import (
    CHUNK,
    DATASETS,
    LENGTH,
    RetroData,
    build_index,
    search,
)
from tokamake.data.indexed.dataset import IndexedDataset
from tokamake.data.samples.document_samples import DocumentSamples
from tokamake.data.samples.index_folder import read_index
from tokamake.data.samples.loader import open_samples
from tokamake.data.samples.steps import batches
from tokamake.data.tokenize.tokenize import tokenize
from tokamake.data.tokenizers import open_tokenizer
from tokamake.errors import UserError
from tokamake.retrieval.index_chunks import index_chunks
from tokamake.train.objectives.retro.samples import RetroSamples, neighbor_hashes
from tokamake.train.trace.trace_sample import _trace

pytestmark = pytest.mark.extra("retrieval", "faiss")


@pytest.fixture(scope="module")
def index(retro_data: RetroData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = build_index(retro_data, tmp_path_factory.mktemp("run"))
    search(retro_data, folder)
    return folder


def texts(retro_data: RetroData, name: str) -> list[list[int]]:
    """Tokens of each document, without its end."""
    dataset, eod = IndexedDataset(retro_data.root / name), open_tokenizer(retro_data.tokenizer).eod
    return [
        tokens[:-1] if tokens[-1] == eod else tokens
        for tokens in (dataset[row].tolist() for row in range(len(dataset)))
    ]


class Chunk(NamedTuple):
    """A chunk, found with nothing of ours."""

    name: str
    document: int
    tokens: list[int]
    """The chunk and the one after it in its document."""


def all_chunks(retro_data: RetroData, index: Path) -> list[Chunk]:
    """Chunks of all datasets of the training split, in the order of their numbers."""
    return [
        Chunk(name, document, tokens[start : start + 2 * CHUNK])
        for name in (each["prefix"] for each in read_index(index)["splits"]["train"]["files"])
        for document, tokens in enumerate(texts(retro_data, name))
        for start in range(0, len(tokens), CHUNK)
    ]


def found(index: Path, split: str) -> dict[str, Any]:
    """Neighbors of each dataset's samples: (samples, C, K)."""
    folder = index.parent / "neighbors" / split
    return {name: np.load(folder / f"{name}.npy") for name in DATASETS}


def places(index: Path, split: str) -> list[tuple[str, int]]:
    """Dataset of each sample, and its number there."""
    files = read_index(index)["splits"][split]["files"]
    numbers = np.load(index / split / "dataset_index.npy").tolist()
    rows = np.load(index / split / "dataset_sample_index.npy").tolist()
    return [(files[n]["prefix"], row) for n, row in zip(numbers, rows, strict=True)]


@pytest.mark.parametrize("split", ["train", "valid"])
def test_no_neighbor_is_of_the_samples_documents_or_of_another_split(
    retro_data: RetroData, index: Path, split: str
) -> None:
    chunks, neighbors = all_chunks(retro_data, index), found(index, split)
    files = read_index(index)["splits"]["train"]["files"]
    trained = {each["prefix"]: range(*each["documents"]) for each in files}
    samples = open_samples(index, split=split, data_root=retro_data.root)
    num_seen = 0
    for number, (name, row) in enumerate(places(index, split)):
        own = {(span.prefix, span.sequence) for span in samples.spans(number)}
        for chunk in (chunks[each] for each in neighbors[name][row].ravel() if each >= 0):
            assert chunk.document in trained[chunk.name]
            assert (chunk.name, chunk.document) not in own
            num_seen += 1
    assert num_seen > 200


@pytest.mark.parametrize("split", ["train", "valid"])
def test_records_have_each_neighbor_and_what_follows_it_in_its_document(
    retro_data: RetroData, index: Path, split: str
) -> None:
    chunks, neighbors = all_chunks(retro_data, index), found(index, split)
    samples = open_samples(index, split=split, data_root=retro_data.root)
    plain = DocumentSamples(index, split=split, data_root=retro_data.root)
    lengths = set()
    for number, (name, row) in enumerate(places(index, split)):
        record = samples[number]
        assert record["tokens"].tolist() == plain[number].tolist()
        assert record["neighbor_tokens"].shape == (LENGTH // CHUNK, 2, 2 * CHUNK)
        for chunk, place in np.ndindex(LENGTH // CHUNK, 2):
            expected = chunks[neighbors[name][row, chunk, place]].tokens
            count = int(record["num_neighbor_tokens"][chunk, place])
            tokens = record["neighbor_tokens"][chunk, place].tolist()
            assert tokens == expected + [0] * (2 * CHUNK - len(expected))
            assert count == len(expected)
            lengths.add(count)
    # Some continue in full, some end with their document.
    assert 2 * CHUNK in lengths
    assert len(lengths) > 2


def test_missing_neighbors_have_no_token(
    retro_data: RetroData, index: Path, tmp_path: Path
) -> None:
    shutil.copytree(index.parent, tmp_path / "run")
    other = tmp_path / "run" / "index"
    # The most similar chunks are mostly of the sample's own documents.
    search(retro_data, other, num_found=3, num_kept=3)
    neighbors, num_missing = found(other, "train"), 0
    samples = open_samples(other, split="train", data_root=retro_data.root)
    for number, (name, row) in enumerate(places(other, "train")):
        is_missing = neighbors[name][row, :, :2] < 0
        num_missing += int(is_missing.sum())
        record = samples[number]
        assert ((record["num_neighbor_tokens"] == 0) == is_missing).all()
        assert not record["neighbor_tokens"][is_missing].any()
        # Missing ones come last.
        assert (is_missing[:, 0] <= is_missing[:, 1]).all()
    assert num_missing > 10


def test_any_worker_reads_the_same_samples(retro_data: RetroData, index: Path) -> None:
    opened = partial(open_samples, index, split="train", data_root=retro_data.root)
    options: Any = {"consumed_samples": 4, "micro_batch_size": 2}
    alone = [*batches(opened(), **options, data_parallel_rank=0, data_parallel_size=1)]
    shared = [
        [*batches(opened(verify=False), **options, data_parallel_rank=rank, data_parallel_size=2)]
        for rank in range(2)
    ]
    pairs = [batch for both in zip(*shared, strict=True) for batch in both]
    assert [each.tobytes() for each in alone][: len(pairs)] == [each.tobytes() for each in pairs]


def refused(retro_data: RetroData, index: Path, message: str) -> None:
    with pytest.raises(UserError, match=message):
        open_samples(index, split="train", data_root=retro_data.root)


def test_neighbors_of_other_samples_or_chunks_are_refused(
    retro_data: RetroData, index: Path, tmp_path: Path
) -> None:
    other = build_index(retro_data, tmp_path, seed=4)
    refused(
        retro_data, other, r"neighbors/chunks.json: no such file.*; run `tokamake index-chunks`"
    )
    shutil.copytree(index.parent / "neighbors", tmp_path / "neighbors")
    refused(retro_data, other, r"train/code.json: neighbors of other samples than the train split")
    shorter = build_index(retro_data, tmp_path, objective_settings='{"chunk_length": 8}')
    refused(retro_data, shorter, "chunks.json: chunks of 16 tokens, the samples have chunks of 8")
    many = build_index(
        retro_data, tmp_path, objective_settings='{"chunk_length": 16, "neighbors": 9}'
    )
    refused(retro_data, many, "code.json: 5 neighbors of each chunk, the samples need 9")
    same = build_index(retro_data, tmp_path)
    open_samples(same, split="train", data_root=retro_data.root)
    shutil.rmtree(tmp_path / "neighbors")
    shutil.copytree(index.parent / "neighbors", tmp_path / "neighbors")
    index_chunks(
        same,
        chunks=retro_data.root / "chunks",
        embeddings=retro_data.root / "vectors",
        factory="IVF8,Flat",
    )
    refused(retro_data, same, "train/code.json: neighbors among other chunks than chunks.json")


def test_the_neighbors_of_the_training_samples_are_part_of_a_run(
    retro_data: RetroData, index: Path, tmp_path: Path
) -> None:
    def hashes() -> dict[str, str]:
        return neighbor_hashes(other, read_index(other))

    shutil.copytree(index.parent, tmp_path / "run")
    other = tmp_path / "run" / "index"
    before = hashes()
    assert {*before} == {"chunks.json", "train/code.json", "train/docs.json"}
    search(retro_data, other, num_found=9)
    changed = {name for name, value in hashes().items() if value != before[name]}
    assert changed == {"train/code.json", "train/docs.json"}
    # Neighbors of validation samples decide no weights.
    search(retro_data, other)
    (other.parent / "neighbors/valid/docs.json").unlink()
    assert hashes() == before


def test_chunks_of_changed_datasets_are_refused(
    retro_data: RetroData, index: Path, tmp_path: Path
) -> None:
    shutil.copytree(retro_data.root, tmp_path / "data")
    shutil.copytree(index.parent, tmp_path / "run")
    changed = retro_data._replace(root=tmp_path / "data")
    tokenize(
        (__file__,), tokenizer=retro_data.tokenizer, output=changed.root / "docs", format="text"
    )
    other = build_index(changed, tmp_path / "run")
    refused(changed, other, "chunks.json: has chunks of another docs than the index")


def test_the_tokens_of_a_sample_are_traced(retro_data: RetroData, index: Path) -> None:
    opened: dict[str, Any] = {"split": "train", "data_root": retro_data.root}
    traced = _trace(RetroSamples(index, **opened), 3)
    assert traced.tokens.tolist() == DocumentSamples(index, **opened)[3].tolist()
    assert traced.origins.tolist() == [*range(LENGTH + 1)]


def test_samples_of_another_objective_have_no_neighbors(
    retro_data: RetroData, tmp_path: Path
) -> None:
    folder = build_index(retro_data, tmp_path, objective="causal", objective_settings="{}")
    with pytest.raises(UserError, match="its samples have no neighbors; run `tokamake index`"):
        RetroSamples(folder, split="train", data_root=retro_data.root)


def test_samples_are_whole_chunks(retro_data: RetroData, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"sequence_length: 72: not a multiple of retro\.chunk"):
        build_index(retro_data, tmp_path, sequence_length=72)
