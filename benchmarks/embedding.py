"""Time the embedding of passages against sentence-transformers, with the same model and batch.

    pip install sentence-transformers
    python benchmarks/embedding.py --corpus corpus.jsonl --rounds 5 --work /scratch

The model is a tower of drawn weights, which transformers has as MegatronBertModel. Passages are
parts of 100 words of a corpus (`corpus.py`). Both get texts in memory, sort them by length,
tokenize and embed them in fp32; tokamake also writes a shard with hashes. Contestants take turns,
round by round. Figures are medians.
"""

import argparse
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import yaml
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from transformers import MegatronBertConfig, MegatronBertModel

from tokamake.checkpoint.init_model import init_model
from tokamake.data.corpus.train_tokenizer import train_tokenizer
from tokamake.inference.layout import peers
from tokamake.retrieval.embedding_options import EmbeddingOptions
from tokamake.retrieval.embeddings import open_embeddings
from tokamake.retrieval.text_vectors import Embedder

_WORDS = 100
"""Most words of a passage, as in DPR."""

Vectors = np.ndarray[Any, Any]


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True, help="jsonl file with texts")
    parser.add_argument("--passages", type=int, default=2000)
    parser.add_argument("--hidden-size", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", type=Path, default=Path("benchmark-work"), help="scratch folder")
    options = parser.parse_args()
    passages = write_inputs(options)
    contestants = {"sentence-transformers": peer(options), "tokamake": tokamake(options)}
    theirs, ours = (embed(passages) for embed in contestants.values())  # both are warm then
    np.testing.assert_allclose(theirs, ours, atol=0.01)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    for number in range(options.rounds):
        for name in [*contestants] if number % 2 else reversed(contestants):
            start, cpu = time.perf_counter(), time.process_time()
            contestants[name](passages)
            measured = time.perf_counter() - start, time.process_time() - cpu
            times[name].append(measured)
    print("| | seconds | CPU s | passages/s |\n| --- | ---: | ---: | ---: |")
    for name, of_rounds in times.items():
        wall, cpu = (median(values) for values in zip(*of_rounds, strict=True))
        print(f"| {name} | {wall:.2f} | {cpu:.2f} | {len(passages) / wall:,.0f} |")
    pairs = [*zip(*times.values(), strict=True)]
    ratios = [median(theirs[at] / ours[at] for theirs, ours in pairs) for at in (0, 1)]
    print(f"\nmedian of the ratios: {ratios[0]:.2f} of seconds, {ratios[1]:.2f} of CPU s")


def write_inputs(options: argparse.Namespace) -> list[str]:
    """Write a tokenizer and a biencoder with one tower; return the passages."""
    work: Path = options.work
    work.mkdir(parents=True, exist_ok=True)
    train_tokenizer((str(options.corpus),), kind="wordpiece", output=work / "tokenizer")
    shape = {
        "family": "biencoder",
        "hidden_size": options.hidden_size,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.hidden_size // 64,
        "max_position_embeddings": options.sequence_length,
        "shared_towers": True,
    }
    (work / "tower.yaml").write_text(yaml.safe_dump(shape))
    shutil.rmtree(work / "model", ignore_errors=True)
    init_model(
        architecture=work / "tower.yaml",
        tokenizer=work / "tokenizer",
        seed=1,
        output=work / "model",
    )
    return passages_of(options.corpus, options.passages)


def passages_of(corpus: Path, number: int) -> list[str]:
    """The first passages of a corpus, of at most `_WORDS` words."""
    passages: list[str] = []
    with corpus.open() as lines:
        for line in lines:
            words = json.loads(line)["text"].split()
            starts = range(0, len(words), _WORDS)
            passages += [" ".join(words[start : start + _WORDS]) for start in starts]
            if len(passages) >= number:
                break
    return passages[:number]


def peer(options: argparse.Namespace) -> Callable[[list[str]], Vectors]:
    """sentence-transformers with the same weights, and the state of [CLS]."""
    source, folder = options.work / "model", options.work / "peer"
    shutil.rmtree(folder, ignore_errors=True)
    config = json.loads((source / "config.json").read_text())
    known = {
        key: value for key, value in config.items() if key not in ("architectures", "model_type")
    }
    model = MegatronBertModel(MegatronBertConfig(**known), add_pooling_layer=False)
    stored = load_file(source / "model.safetensors")
    model.load_state_dict({key.removeprefix("shared_model."): stored[key] for key in stored})
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(source / name, folder / name)
    transformer = Transformer(str(folder), max_seq_length=options.sequence_length)
    pooling = Pooling(options.hidden_size, pooling_mode="cls")
    whole = SentenceTransformer(modules=[transformer, pooling], device="cpu")

    def embed(passages: list[str]) -> Vectors:
        vectors: Vectors = whole.encode(passages, batch_size=options.batch_size)
        return vectors

    return embed


def tokamake(options: argparse.Namespace) -> Callable[[list[str]], Vectors]:
    """The stage `embed-passages` without reading its files: texts become a shard on disk."""
    folder = options.work / "vectors"
    with peers() as ranks:
        embedder = Embedder(
            options.work / "model",
            "block",
            tokenizer=None,
            options=EmbeddingOptions(
                sequence_length=options.sequence_length, batch_size=options.batch_size
            ),
            peers=ranks,
        )

    def embed(passages: list[str]) -> Vectors:
        shutil.rmtree(folder, ignore_errors=True)
        texts = (embedder.tokenized(number, text) for number, text in enumerate(passages))
        embedder.write(texts, manifest=folder / "docs.json", made_from={})
        store = open_embeddings(folder)
        vectors: Vectors = store.take(np.arange(store.num_vectors))
        return vectors

    return embed


if __name__ == "__main__":
    main()
