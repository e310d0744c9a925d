"""Real text as datasets of documents, a tiny BERT, and the neighbors of samples of retro."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from tokamake.checkpoint.init_model import init_model
from tokamake.data.samples.index import index
from tokamake.data.tokenize.tokenize import tokenize
from tokamake.retrieval.chunk_documents import chunk_documents
from tokamake.retrieval.embed_chunks import embed_chunks
from tokamake.retrieval.embed_samples import embed_samples
from tokamake.retrieval.embedding_options import ChunkEmbedding
from tokamake.retrieval.find_neighbors import find_neighbors
from tokamake.retrieval.index_chunks import index_chunks

LENGTH, CHUNK = 64, 16
SECTION = {"chunk_length": CHUNK, "neighbors": 2, "retrieved_chunks": 2}
SEARCH = {"num_found": 40, "num_kept": 5}
BERT = """family: bert
hidden_size: 32
num_hidden_layers: 1
num_attention_heads: 2
max_position_embeddings: 128
"""
DATASETS = ("code", "docs")


class RetroData(NamedTuple):
    """A folder with the datasets code and docs."""

    root: Path
    """Folder of the datasets, chunks/NAME.json and vectors/NAME/0.json."""
    tokenizer: Path
    """Tokenizer of the datasets."""
    bert: Path
    """Tiny BERT with random weights, and its own tokenizer."""


def at(folder: Path, tokenizer: Path) -> RetroData:
    """The data that `make_datasets` wrote."""
    return RetroData(folder / "data", tokenizer, folder / "bert")


def make_datasets(folder: Path, *, raw: Path, tokenizer: Path, wordpiece: Path) -> None:
    """Tokenize a file of each of the corpora code and docs, and embed their chunks by a BERT."""
    data = at(folder, tokenizer)
    data.root.mkdir()
    (folder / "bert.yaml").write_text(BERT)
    init_model(architecture=folder / "bert.yaml", tokenizer=wordpiece, seed=1, output=data.bert)
    for name in DATASETS:
        first = min((raw / name).glob("*"))
        tokenize((str(first),), tokenizer=tokenizer, output=data.root / name)
        embed(data, name)
    (data.root / "weights.txt").write_text("0.6 code code\n0.4 docs docs\n")


def embed(data: RetroData, name: str) -> None:
    """Make the chunks of a dataset and their vectors."""
    chunks = data.root / "chunks" / f"{name}.json"
    tokenizer = data.tokenizer
    chunk_documents(data.root / name, output=chunks, tokenizer=tokenizer, chunk_length=CHUNK)
    embed_chunks(
        data.root / name,
        chunks=chunks,
        embedding=ChunkEmbedding(data.bert, tokenizer),
        output=data.root / "vectors" / name / "0.json",
    )


def build_index(data: RetroData, folder: Path, **changes: Any) -> Path:
    """Index samples of objective retro to `folder`/index."""
    options: dict[str, Any] = {
        "weights": data.root / "weights.txt",
        "data_root": data.root,
        "sequence_length": LENGTH,
        "train_samples": 60,
        "valid_samples": 12,
        "split": "80,20,0",
        "objective": "retro",
        "objective_settings": json.dumps(SECTION),
        "seed": 3,
        "output": folder / "index",
    }
    index(**options | changes)
    return folder / "index"


def search(data: RetroData, index_folder: Path, **changes: Any) -> None:
    """Index all chunks, and find the neighbors of all samples."""
    folder, root = index_folder.parent, data.root
    index_chunks(index_folder, chunks=root / "chunks", embeddings=root / "vectors")
    for split in ("train", "valid"):
        for name in DATASETS:
            ask(data, index_folder, split=split, name=name)
            find_neighbors(
                index_folder,
                data_root=root,
                split=split,
                dataset=name,
                queries=folder / "asked" / split / name,
                **SEARCH | changes,
            )


def ask(data: RetroData, index_folder: Path, *, split: str, name: str) -> None:
    """Embed the chunks of the samples of a dataset."""
    embed_samples(
        index_folder,
        data_root=data.root,
        split=split,
        dataset=name,
        embedding=ChunkEmbedding(data.bert, data.tokenizer),
        output=index_folder.parent / "asked" / split / name / "0.json",
    )
