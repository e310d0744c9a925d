"""Neighbors equal a search by NumPy; vectors of chunks equal transformers' BERT."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.support.faults import Inject
from tests.support.neighbors import (
    CHUNK,
    DATASETS,
    LENGTH,
    SEARCH,
    RetroData,
    ask,
    build_index,
    embed,
    search,
)
from tests.support.paths import SUPPORT
from tests.support.ranks import spawn
from tokamake.data.indexed.dataset import IndexedDataset
from tokamake.data.samples.document_samples import DocumentSamples
from tokamake.data.samples.index_folder import read_index
from tokamake.data.samples.loader import open_samples
from tokamake.data.tokenize.tokenize import tokenize
from tokamake.data.tokenizers import open_tokenizer
from tokamake.errors import UserError
from tokamake.inference.layout import Peers
from tokamake.retrieval.chunk_documents import chunk_documents
from tokamake.retrieval.chunk_texts import embedded_texts
from tokamake.retrieval.embed_chunks import embed_chunks
from tokamake.retrieval.embedding_options import ChunkEmbedding, EmbeddingOptions
from tokamake.retrieval.embeddings import open_embeddings
from tokamake.retrieval.find_neighbors import find_neighbors
from tokamake.retrieval.index_chunks import index_chunks
from tokamake.retrieval.neighbors import keep_nearest
from tokamake.retrieval.text_vectors import Embedder
from tokamake.runtime.ranks import Ranks

FAISS = pytest.mark.extra("retrieval", "faiss")


def texts(data: RetroData, name: str) -> list[list[int]]:
    """Tokens of each document, without its end."""
    dataset, eod = IndexedDataset(data.root / name), open_tokenizer(data.tokenizer).eod
    rows = [dataset[row].tolist() for row in range(len(dataset))]
    return [row[:-1] if row[-1] == eod else row for row in rows]


@pytest.mark.parametrize("name", DATASETS)
def test_vectors_equal_transformers(retro_data: RetroData, name: str) -> None:
    from transformers import AutoModel, AutoTokenizer

    bert = AutoModel.from_pretrained(retro_data.bert).eval()
    tokenizer = open_tokenizer(retro_data.tokenizer)
    wordpiece = AutoTokenizer.from_pretrained(retro_data.bert)
    chunks = [
        document[start : start + CHUNK]
        for document in texts(retro_data, name)
        for start in range(0, len(document), CHUNK)
    ]
    embedded = open_embeddings(retro_data.root / "vectors" / name, verify=True)
    decoded = [tokenizer.decode(chunk) for chunk in chunks]
    assert embedded.ids.tolist() == [n for n, text in enumerate(decoded) if text.strip()]
    for position in range(0, embedded.num_vectors, 97):
        ids = wordpiece(decoded[embedded.ids[position]], return_tensors="pt")["input_ids"]
        with torch.no_grad():
            states = bert(input_ids=ids).last_hidden_state[0, 1:-1]
        expected = torch.nn.functional.normalize(states.mean(0), dim=0).numpy()
        found = embedded.take(np.array([position]))[0]
        np.testing.assert_allclose(found, expected, atol=2e-3)


@FAISS
@pytest.mark.parametrize("split", ["train", "valid"])
def test_neighbors_equal_a_search_by_numpy(
    retro_data: RetroData, tmp_path: Path, split: str
) -> None:
    data, index = retro_data, build_index(retro_data, tmp_path)
    search(data, index)
    description = read_index(index)["splits"]
    trained = [
        (each["prefix"], range(*each["documents"])) for each in description["train"]["files"]
    ]
    owners, vectors, first = [], [], 0
    for name, documents in trained:
        shard = open_embeddings(data.root / "vectors" / name)
        rows = [
            document
            for document, tokens in enumerate(texts(data, name))
            for _ in range(0, len(tokens), CHUNK)
        ]
        for number, vector in zip(shard.ids, shard.take(np.arange(shard.num_vectors)), strict=True):
            if rows[number] in documents:
                owners.append((first + int(number), name, rows[number]))
                vectors.append(vector)
        first += len(rows)
    matrix = np.stack(vectors)
    samples = DocumentSamples(index, split=split, data_root=data.root)
    num_chunks = LENGTH // CHUNK
    for name in DATASETS:
        kept = np.load(tmp_path / "neighbors" / split / f"{name}.npy")
        asked = open_embeddings(tmp_path / "asked" / split / name)
        queries = dict(
            zip(asked.ids.tolist(), asked.take(np.arange(asked.num_vectors)), strict=True)
        )
        rows = {
            int(samples._dataset_sample_index[number]): number
            for number in range(len(samples))
            if samples.prefixes[samples._dataset_number(number)].name == name
        }
        assert kept.shape == (len(rows), num_chunks, SEARCH["num_kept"])
        for place, number in rows.items():
            own = {(span.prefix, span.sequence) for span in samples.spans(number)}
            for chunk in range(num_chunks):
                query = queries.get(place * num_chunks + chunk)
                if query is None:
                    assert (kept[place, chunk] == -1).all()
                    continue
                scores = matrix @ query
                best = np.argsort(-scores, kind="stable")[: SEARCH["num_found"]]
                allowed = [row for row in best if owners[row][1:] not in own]
                expected = scores[allowed[: SEARCH["num_kept"]]]
                numbers = [owner[0] for owner in owners]
                got = scores[[numbers.index(each) for each in kept[place, chunk] if each >= 0]]
                # Equal scores of equal chunks may come in any order.
                np.testing.assert_allclose(got, expected, atol=1e-5)


@FAISS
def test_workers_and_reruns_do_not_change_the_bytes(
    retro_data: RetroData, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index = build_index(retro_data, tmp_path)
    search(retro_data, index)
    manifest, file = tmp_path / "neighbors/train/docs.json", tmp_path / "neighbors/train/docs.npy"
    before = (manifest.read_bytes(), file.read_bytes())
    capsys.readouterr()
    search(retro_data, index, workers=2)
    assert all(line.endswith("already complete") for line in capsys.readouterr().out.splitlines())
    manifest.unlink()
    search(retro_data, index, workers=2)
    assert (manifest.read_bytes(), file.read_bytes()) == before


@FAISS
def test_a_changed_corpus_redoes_its_own_part(
    retro_data: RetroData, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = retro_data._replace(root=tmp_path / "data")
    shutil.copytree(retro_data.root, data.root)
    raw = tmp_path / "more.txt"
    raw.write_text("Another document, which has words of its own.\n" * 40)
    tokenize((str(raw),), tokenizer=data.tokenizer, output=data.root / "docs")
    with pytest.raises(UserError, match=r"docs.json: chunks of another dataset than docs; run"):
        search(data, build_index(data, tmp_path, split="100,0,0", valid_samples=0))
    capsys.readouterr()
    for name in DATASETS:
        embed(data, name)
    lines = capsys.readouterr().out.splitlines()
    complete = [line.partition(":")[0] for line in lines if line.endswith("already complete")]
    root = data.root
    assert complete == [f"{root}/chunks/code.json", f"{root}/vectors/code/0.json"]


def on_ranks(data: RetroData, output: Path) -> None:
    size = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if size > 1 else 0
    peers = Peers(Ranks(rank, size, rank, size), torch.device("cpu"))
    embedder = Embedder(
        data.bert, "chunk", tokenizer=None, options=EmbeddingOptions(batch_size=8), peers=peers
    )
    tokenizer = open_tokenizer(data.tokenizer)
    chunks = [(row, np.array(tokens[:CHUNK])) for row, tokens in enumerate(texts(data, "docs"))]
    written = embedded_texts(chunks, tokenizer=tokenizer, embedder=embedder)
    embedder.write(written, manifest=output / "docs.json", made_from={})


@pytest.mark.ranks
def test_ranks_write_the_same_bytes(retro_data: RetroData, tmp_path: Path) -> None:
    on_ranks(retro_data, tmp_path / "alone")
    spawn(on_ranks, 2, retro_data, tmp_path / "shared")
    for name in ("docs.npy", "docs.ids.npy", "docs.json"):
        alone, shared = ((tmp_path / each / name).read_bytes() for each in ("alone", "shared"))
        assert alone == shared, name


def test_keep_nearest() -> None:
    found = np.array([[[5, 3, 9, -1], [9, 9, 9, 9]], [[3, 5, 2, 9], [-1, -1, -1, -1]]])
    own = [np.array([4, 4]), np.array([1, 0])]
    options: dict[str, Any] = {"own": own, "num_documents": 5, "num_kept": 2}
    kept = keep_nearest(found, lambda chunks: chunks // 2, **options)
    assert kept.tolist() == [[[5, 3], [-1, -1]], [[5, 9], [-1, -1]]]


def test_keep_nearest_looks_beyond_the_first_ones() -> None:
    found = np.array([[[8, 9, 8, 9, 1, 2, 3]]])
    options: dict[str, Any] = {"num_documents": 5, "num_kept": 2}
    for own, expected in ([np.array([4])], [1, 2]), ([np.zeros(0, np.int64)], [8, 9]):
        kept = keep_nearest(found, lambda chunks: chunks // 2, own=own, **options)
        assert kept.tolist() == [[expected]]


def test_sets_chunks_without_text_aside(retro_data: RetroData, tmp_path: Path) -> None:
    raw = tmp_path / "blank.jsonl"
    documents = ["\n" * 200, "A few words. " * 30]
    raw.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    tokenize((str(raw),), tokenizer=retro_data.tokenizer, output=tmp_path / "blank")
    data = retro_data._replace(root=tmp_path)
    embed(data, "blank")
    first = np.load(tmp_path / "chunks/blank.npy")
    assert first[1] > 0, "the blank document has chunks"
    ids = open_embeddings(tmp_path / "vectors/blank").ids
    assert ids.tolist() == [*range(int(first[1]), int(first[2]))]


@FAISS
def test_mistakes(retro_data: RetroData, tmp_path: Path) -> None:
    data, root = retro_data, retro_data.root
    index = build_index(data, tmp_path)
    folders = {"chunks": root / "chunks", "embeddings": root / "vectors"}
    with pytest.raises(UserError, match="vectors/code: vectors of other chunks than"):
        other = tmp_path / "longer"
        for name in DATASETS:
            chunk_documents(
                root / name,
                output=other / f"{name}.json",
                tokenizer=data.tokenizer,
                chunk_length=CHUNK * 2,
            )
        section = json.dumps({"chunk_length": CHUNK * 2})
        longer = build_index(data, tmp_path / "other", objective_settings=section)
        index_chunks(longer, **folders | {"chunks": other})
    with pytest.raises(UserError, match=f"chunks of {CHUNK * 2} tokens, the samples of .* have"):
        index_chunks(index, **folders | {"chunks": other})
    with pytest.raises(UserError, match="vectors/code: no embeddings; run `tokamake embed-chunks"):
        (tmp_path / "vectors/code").mkdir(parents=True)
        index_chunks(index, **folders | {"embeddings": tmp_path / "vectors"})
    with pytest.raises(UserError, match=r"--num-found: 9999: more than the .* of the training"):
        index_chunks(index, **folders, num_found=9999)
    assert not (tmp_path / "neighbors").exists()
    index_chunks(index, **folders)
    ask(data, index, split="train", name="docs")
    find: dict[str, Any] = {
        "data_root": root,
        "split": "train",
        "dataset": "docs",
        "queries": tmp_path / "asked/train/docs",
    }
    with pytest.raises(UserError, match=r"--num-found: 100000: more than the .* lower it"):
        find_neighbors(index, **find, num_found=100_000)
    with pytest.raises(UserError, match="--num-kept: 9: keep 1 or more, at most --num-found 8"):
        find_neighbors(index, **find, num_found=8, num_kept=9)
    with pytest.raises(UserError, match="vectors of other samples than valid has"):
        find_neighbors(index, **find | {"split": "valid"}, **SEARCH)
    with pytest.raises(UserError, match="asked/valid/docs: no embeddings"):
        find_neighbors(index, **find | {"queries": tmp_path / "asked/valid/docs"}, **SEARCH)


def test_a_model_that_embeds_no_chunks_is_refused(retro_data: RetroData, tmp_path: Path) -> None:
    from tokamake.checkpoint.init_model import init_model

    (tmp_path / "gpt.yaml").write_text(
        "family: llama\nhidden_size: 32\nnum_hidden_layers: 1\nnum_attention_heads: 2\n"
        "max_position_embeddings: 128\n"
    )
    model = tmp_path / "gpt"
    init_model(architecture=tmp_path / "gpt.yaml", tokenizer=retro_data.bert, seed=1, output=model)
    with pytest.raises(UserError, match="family llama; name a BERT, or a biencoder"):
        embed_chunks(
            retro_data.root / "docs",
            chunks=retro_data.root / "chunks/docs.json",
            embedding=ChunkEmbedding(model, retro_data.tokenizer),
            output=tmp_path / "docs.json",
        )


@FAISS
def test_a_dataset_without_samples_of_a_split_has_no_neighbors(
    retro_data: RetroData, tmp_path: Path
) -> None:
    (tmp_path / "weights.txt").write_text("1 code code\n")
    index = build_index(retro_data, tmp_path, weights=tmp_path / "weights.txt")
    search(retro_data, index)
    assert np.load(tmp_path / "neighbors/train/docs.npy").shape == (0, LENGTH // CHUNK, 5)
    assert len(open_samples(index, split="train", data_root=retro_data.root)[0]["tokens"]) == 65


def killed_commands(data: RetroData, index: Path, folder: Path) -> dict[Path, list[str | Path]]:
    """Each stage as a command that writes to a folder, by its manifest."""
    root, name = data.root, "docs"
    asked = ["--data-root", root, "--split", "train", "--dataset", name]
    model = ["--checkpoint", data.bert, "--tokenizer", data.tokenizer]
    chunks, vectors = folder / f"chunks/{name}.json", folder / f"vectors/{name}/0.json"
    number = folder / "neighbors/chunks.json"
    made = ["--chunks", root / "chunks", "--embeddings", root / "vectors"]
    commands: dict[Path, list[str | Path]] = {
        chunks: ["chunk-documents", root / name, "--tokenizer", data.tokenizer],
        vectors: ["embed-chunks", root / name, "--chunks", root / f"chunks/{name}.json", *model],
        number: ["index-chunks", index, *made, "--factory", "IVF8,Flat"],
        folder / "asked/0.json": ["embed-samples", index, *asked, *model],
        folder / "neighbors/train/docs.json": [
            *("find-neighbors", index, *asked, "--queries", folder / "asked", "--chunks", number),
            *("--num-found", "40", "--num-kept", "5"),
        ],
    }
    return {path: [*command, "--output", path] for path, command in commands.items()}


@FAISS
@pytest.mark.grid
@pytest.mark.fault("kill of a stage")
def test_kills_leave_the_same_bytes_after_a_rerun(
    retro_data: RetroData, tmp_path: Path, inject: Inject
) -> None:
    index = build_index(retro_data, tmp_path)
    program = [sys.executable, SUPPORT / "faulty.py"]
    for folder in (tmp_path / "whole", tmp_path / "killed"):
        for manifest, command in killed_commands(retro_data, index, folder).items():
            manifest.parent.mkdir(parents=True, exist_ok=True)
            # File operations: each is the last one of a process.
            for when in map(str, range(1, 7)) if folder.name == "killed" else ():
                inject()
                done = subprocess.run([*program, when, *command], capture_output=True, check=False)
                assert done.returncode in (0, -signal.SIGKILL), done.stderr
                if manifest.exists():
                    break
            subprocess.run([*program, "1000", *command], capture_output=True, check=True)
    whole, killed = (
        {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*.npy"))}
        for folder in (tmp_path / "whole", tmp_path / "killed")
    )
    assert killed == whole
    assert len(whole) == 7
    assert not [*tmp_path.rglob("*.tmp-*")]
