"""Measure how much neighbors lower the validation loss of a small Retro, beside random neighbors.

    python benchmarks/retro.py --work /scratch

Texts are the copyright files of Debian packages, which share passages of licences; equal files are
left out. For each seed, two runs have the same samples, weights and settings. One run has the
neighbors that the stages find. In the other, each neighbor is a random chunk of the same index, of
no document of the sample.
"""

import argparse
import hashlib
import json
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import yaml

from tokamake import files
from tokamake.checkpoint.init_model import init_model
from tokamake.data.corpus.train_tokenizer import train_tokenizer
from tokamake.data.samples.index import index
from tokamake.data.tokenize.tokenize import tokenize
from tokamake.retrieval.chunk_documents import chunk_documents
from tokamake.retrieval.embed_chunks import embed_chunks
from tokamake.retrieval.embed_samples import embed_samples
from tokamake.retrieval.embedding_options import ChunkEmbedding
from tokamake.retrieval.find_neighbors import find_neighbors
from tokamake.retrieval.index_chunks import index_chunks
from tokamake.retrieval.products import new_product
from tokamake.train.objectives.retro.chunks import ChunkDatabase
from tokamake.train.objectives.retro.samples import ChunkedSamples
from tokamake.train.resolve import resolve

_TEXTS = "/usr/share/doc/*/copyright"
_LARGEST = 1 << 16
_LENGTH, _CHUNK, _NEIGHBORS, _KEPT, _FOUND = 64, 16, 2, 4, 100
_BATCH, _VOCAB, _SPLIT = 32, 2048, "90,10,0"
_VALIDATION = 16
"""Steps of a validation."""
_BERT = {
    "family": "bert",
    "hidden_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 512,
}
_RETRO = {
    "family": "retro",
    "decoder": "llama",
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": _LENGTH,
    "chunk_length": _CHUNK,
    "tie_word_embeddings": True,
    "first_retrieval_layer": 1,
    "retrieval_interval": 1,
    "num_encoder_layers": 1,
    "encoder_hidden_dropout": 0.0,
    "encoder_attention_dropout": 0.0,
}
_SECTION = {"chunk_length": _CHUNK, "neighbors": _NEIGHBORS, "retrieved_chunks": 2}
NAME = "texts"
FOUND, RANDOM = "found", "random"


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", default=_TEXTS, help="pattern of text files")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rate", type=float, default=3e-3, help="learning rate")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--work", type=Path, default=Path("benchmark-work"), help="scratch folder")
    options = parser.parse_args()
    folder: Path = options.work / "retro"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    start = time.monotonic()
    write_data(folder, options.texts)
    losses: dict[str, list[float]] = {FOUND: [], RANDOM: []}
    for seed in options.seeds:
        write_neighbors(folder, seed, num_samples=options.steps * _BATCH)
        for name, values in losses.items():
            values.append(train(folder / f"{name}-{seed}", folder, options, seed=seed))
            print(f"seed {seed}, {name} neighbors: {values[-1]:.4f}", flush=True)
    minutes = (time.monotonic() - start) / 60
    used = [resource.getrusage(kind) for kind in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu = sum(each.ru_utime + each.ru_stime for each in used) / 60
    print("| neighbors | validation loss, mean of the seeds | spread (standard deviation) |")
    print("| --- | ---: | ---: |")
    for name, values in losses.items():
        spread = stdev(values) if len(values) > 1 else 0.0
        print(f"| {name} | {mean(values):.3f} | {spread:.3f} |")
    print(f"{minutes:.1f} minutes, {cpu:.1f} CPU minutes")


def write_data(folder: Path, pattern: str) -> None:
    """Tokenize the texts, and embed their chunks by a BERT with random weights."""
    root, name = Path(pattern).anchor, pattern.lstrip("/")
    found = {path.read_bytes(): path for path in sorted(Path(root).glob(name)) if is_text(path)}
    ordered = sorted(found, key=lambda content: hashlib.sha256(content).digest())
    lines = [json.dumps({"text": content.decode()}) for content in ordered]
    raw = folder / f"{NAME}.jsonl"
    raw.write_text("".join(f"{line}\n" for line in lines))
    print(f"{len(lines):,} documents, {raw.stat().st_size:,} bytes")
    for kind in ("bpe", "wordpiece"):
        train_tokenizer((str(raw),), kind=kind, vocab_size=_VOCAB, output=folder / kind)
    for model, shape in (("embedder", _BERT), ("retro", _RETRO)):
        (folder / f"{model}.yaml").write_text(yaml.safe_dump(shape))
    embedder = folder / "embedder"
    init_model(
        architecture=folder / "embedder.yaml",
        tokenizer=folder / "wordpiece",
        seed=1,
        output=embedder,
    )
    prefix, tokenizer = folder / NAME, folder / "bpe"
    tokenize((str(raw),), tokenizer=tokenizer, output=prefix)
    (folder / "weights.txt").write_text(f"1 {NAME} {NAME}\n")
    chunks = folder / f"chunks/{NAME}.json"
    chunk_documents(prefix, output=chunks, tokenizer=tokenizer, chunk_length=_CHUNK)
    embed_chunks(
        prefix,
        chunks=chunks,
        embedding=ChunkEmbedding(embedder, tokenizer),
        output=folder / f"vectors/{NAME}/0.json",
    )


def is_text(path: Path) -> bool:
    """Whether a file is UTF-8 and not too large."""
    if not path.is_file() or path.stat().st_size > _LARGEST:
        return False
    try:
        path.read_bytes().decode()
    except UnicodeDecodeError:
        return False
    return True


def write_neighbors(folder: Path, seed: int, *, num_samples: int) -> None:
    """Index the samples of a seed and find their neighbors; copy both with random neighbors."""
    run = folder / f"{FOUND}-{seed}"
    index(
        weights=folder / "weights.txt",
        sequence_length=_LENGTH,
        train_samples=num_samples,
        valid_samples=_VALIDATION * _BATCH,
        split=_SPLIT,
        objective="retro",
        objective_settings=json.dumps(_SECTION),
        seed=seed,
        output=run / "index",
    )
    index_chunks(run / "index", chunks=folder / "chunks", embeddings=folder / "vectors")
    for split in ("train", "valid"):
        asked = run / "asked" / split
        embed_samples(
            run / "index",
            data_root=folder,
            split=split,
            dataset=NAME,
            embedding=ChunkEmbedding(folder / "embedder", folder / "bpe"),
            output=asked / "0.json",
        )
        find_neighbors(
            run / "index",
            data_root=folder,
            split=split,
            dataset=NAME,
            queries=asked,
            num_found=_FOUND,
            num_kept=_KEPT,
        )
    shutil.copytree(run, folder / f"{RANDOM}-{seed}")
    for split in ("train", "valid"):
        draw_neighbors(folder / f"{RANDOM}-{seed}", split, data_root=folder, seed=seed)


def draw_neighbors(run: Path, split: str, *, data_root: Path, seed: int) -> None:
    """Replace each neighbor by a random chunk of no document of the sample."""
    manifest = run / f"neighbors/{split}/{NAME}.json"
    facts = files.read_sealed_json(manifest, "find them again")
    found = np.load(manifest.with_suffix(".npy"))
    database = ChunkDatabase(run / "neighbors/chunks.json", data_root=data_root)
    samples = ChunkedSamples(run / "index", split=split, data_root=data_root)
    searched = np.unique(found[found >= 0])
    draw = np.random.default_rng(seed)
    drawn = np.where(found < 0, -1, draw.choice(searched, size=found.shape))
    for place, rows in enumerate(drawn):
        own = samples.documents(0, place)
        while (clash := np.isin(database.documents(rows), own) & (rows >= 0)).any():
            rows[clash] = draw.choice(searched, size=int(clash.sum()))
    kept = {key: facts[key] for key in facts if key not in ("kind", "version", "bytes", "hashes")}
    with (
        new_product(manifest, kind=facts["kind"], suffixes=(".npy",), facts=kept) as product,
        product.paths[".npy"].open("wb") as file,
    ):
        np.save(file, drawn)


def train(run: Path, folder: Path, options: argparse.Namespace, *, seed: int) -> float:
    """Train a run; return its last validation loss."""
    settings: dict[str, Any] = {
        "objective": "retro",
        "retro": {**_SECTION, "embedder": str(folder / "embedder"), "num_kept": _KEPT},
        "sequence_length": _LENGTH,
        "micro_batch_size": _BATCH,
        "global_batch_size": _BATCH,
        "train_steps": options.steps,
        "split": _SPLIT,
        "optimizer": {"learning_rate": options.rate},
        "schedule": {"warmup_fraction": 0.1},
        "evaluation_interval": options.steps // 4,
        "evaluation_steps": _VALIDATION,
    }
    resolve(
        settings=json.dumps(settings),
        run=run.name,
        seed=seed,
        architecture=folder / "retro.yaml",
        index=run / "index",
        data_root=folder,
        tokenizer=folder / "bpe",
        output_folder=run / "training",
        output=run / "run.yaml",
    )
    command = [sys.executable, "-m", "tokamake", "train", "--config", run / "run.yaml"]
    subprocess.run(command, check=True, stdout=(run / "train.log").open("w"))
    metrics = [json.loads(line) for line in (run / "training/metrics.jsonl").open()]
    return float([row for row in metrics if "validation_loss" in row][-1]["validation_loss"])


if __name__ == "__main__":
    main()
