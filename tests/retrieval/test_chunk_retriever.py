"""A retro that writes finds the chunks that the training would have found."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests.support.neighbors import CHUNK, RetroData, build_index
from tests.support.random_tensors import random_tensors
from tests.support.retros import retro
from tests.support.runs import write_start
from tokamake.checkpoint.model_tensors import to_model
from tokamake.config.architecture import Architecture
from tokamake.data.indexed.dataset import IndexedDataset
from tokamake.data.mixture.split_prefixes import SplitPrefixes
from tokamake.data.tokenizers import open_tokenizer
from tokamake.errors import UserError
from tokamake.evaluate.evaluate import evaluate
from tokamake.generate.generate import Ends, generate
from tokamake.inference.layout import Peers
from tokamake.inference.sampling_settings import Sampling
from tokamake.retrieval.chunk_retriever import ChunkRetriever, NeighborOptions
from tokamake.retrieval.index_chunks import index_chunks
from tokamake.runtime.ranks import ALONE

FAISS = pytest.mark.extra("retrieval", "faiss")
SHAPE = retro(vocab_size=400, chunk_length=CHUNK, max_position_embeddings=128)


@pytest.fixture(scope="module")
def options(retro_data: RetroData, tmp_path_factory: pytest.TempPathFactory) -> NeighborOptions:
    """An index of the chunks of both datasets."""
    folder = build_index(retro_data, tmp_path_factory.mktemp("retrieved"))
    index_chunks(folder, chunks=retro_data.root / "chunks", embeddings=retro_data.root / "vectors")
    return NeighborOptions(folder.parent / "neighbors/chunks.json", embedder=retro_data.bert)


def retriever_of(options: NeighborOptions, data: RetroData, length: int = CHUNK) -> ChunkRetriever:
    tokenizer, peers = open_tokenizer(data.tokenizer), Peers(ALONE, torch.device("cpu"))
    return ChunkRetriever(
        options, data_root=data.root, tokenizer=tokenizer, chunk_length=length, peers=peers
    )


@FAISS
def test_the_nearest_chunk_is_the_chunk_itself_with_what_follows_it(
    options: NeighborOptions, retro_data: RetroData
) -> None:
    retriever = retriever_of(options, retro_data)
    document = next(row for row in IndexedDataset(retro_data.root / "docs") if len(row) > 3 * CHUNK)
    eod = open_tokenizer(retro_data.tokenizer).eod
    without_text = np.full(CHUNK, eod)
    tokens, counts = retriever(np.stack([without_text, document[:CHUNK]]))
    assert tokens.shape == (2, 2, 2 * CHUNK)
    assert counts[1, 0] == 2 * CHUNK
    assert tokens[1, 0].tolist() == document[: 2 * CHUNK].tolist()
    assert counts[0].tolist() == [0, 0]


@FAISS
def test_generate_writes_what_a_pass_over_all_tokens_predicts(
    options: NeighborOptions, retro_data: RetroData, tmp_path: Path
) -> None:
    weights = {name: 4 * each for name, each in random_tensors(SHAPE, 1).items()}
    write_start(tmp_path / "model", SHAPE, weights)
    tokenizer = open_tokenizer(retro_data.tokenizer)
    prompt = "Return the number of bytes that a file has, and the names of all of them. " * 2
    texts = {}
    for name, neighbors in (("with", options), ("without", NeighborOptions())):
        generate(
            checkpoint=tmp_path / "model",
            tokenizer=retro_data.tokenizer,
            prompts=(prompt,),
            ends=Ends(24),
            sampling=Sampling(temperature=0.0),
            data_root=retro_data.root,
            neighbors=neighbors,
            output=tmp_path / "texts.json",
        )
        ((sample),) = json.loads((tmp_path / "texts.json").read_text())
        texts[name] = sample["text"]
    assert texts["with"] != texts["without"]
    model, retriever = to_model(SHAPE, weights), retriever_of(options, retro_data)
    tokens = begin = tokenizer.encode_prompt(prompt)
    with torch.no_grad():
        for _ in range(24):
            tokens = [*tokens, _next(model, tokens, retriever)]
    assert texts["with"] == tokenizer.decode(tokens)[len(tokenizer.decode(begin)) :]


def _next(model: Any, tokens: list[int], retriever: ChunkRetriever) -> int:
    """The most likely next token, by a pass over whole chunks."""
    filled = np.array(tokens + [0] * (-len(tokens) % CHUNK))
    logits = model(torch.from_numpy(filled)[None], **neighbors_of(retriever, filled))
    return int(logits[0, len(tokens) - 1].argmax())


def neighbors_of(retriever: ChunkRetriever, row: Any) -> dict[str, torch.Tensor]:
    """Neighbors of the chunks of a text, one by one, as inputs of a model."""
    found = [retriever(chunk[None]) for chunk in np.split(row, len(row) // CHUNK)]
    return {
        name: torch.from_numpy(np.concatenate([pair[place] for pair in found]))[None]
        for place, name in enumerate(("neighbor_tokens", "num_neighbor_tokens"))
    }


@FAISS
def test_evaluate_scores_held_out_text_with_neighbors(
    options: NeighborOptions, retro_data: RetroData, tmp_path: Path
) -> None:
    weights = {name: 4 * each for name, each in random_tensors(SHAPE, 1).items()}
    write_start(tmp_path / "model", SHAPE, weights)
    length, losses = 3 * CHUNK, {}
    for name, neighbors in (("with", options), ("without", NeighborOptions())):
        output = tmp_path / f"{name}.json"
        evaluate(
            checkpoint=tmp_path / "model",
            weights=retro_data.root / "weights.txt",
            split="80,0,20",
            tokenizer=retro_data.tokenizer,
            sequence_length=length,
            max_tokens=5 * length + 9,
            batch_size=2,
            neighbors=neighbors,
            output=output,
        )
        losses[name] = json.loads(output.read_text())["corpora"]["docs"]["loss"]
    assert losses["with"] != pytest.approx(losses["without"], rel=1e-4)
    model, retriever = to_model(SHAPE, weights), retriever_of(options, retro_data)
    splits = SplitPrefixes(
        retro_data.root / "weights.txt",
        data_root=retro_data.root,
        split="80,0,20",
        split_rule="megatron_core",
        held_out={},
    )
    (line,) = (line for line in splits.lines("test") if line.corpus == "docs")
    dataset = IndexedDataset(retro_data.root / "docs")
    documents = [dataset[row] for row in splits.documents("test", line, len(dataset))]
    stream = np.concatenate(documents).astype(np.int64)[: 5 * length + 9]
    total = 0.0
    for start in range(0, len(stream) - 1, length):
        window = stream[start : start + length + 1]
        inputs = np.pad(window[:-1], (0, length - len(window) + 1))
        logits = model(torch.from_numpy(inputs)[None], **neighbors_of(retriever, inputs))
        labels = torch.from_numpy(window[1:])
        total += F.cross_entropy(logits[0, : len(labels)], labels, reduction="sum").item()
    assert losses["with"] == pytest.approx(total / (len(stream) - 1), rel=1e-5)


@FAISS
def test_other_chunks_tokenizers_and_models_are_refused(
    options: NeighborOptions, retro_data: RetroData
) -> None:
    with pytest.raises(UserError, match=r"chunks.json: chunks of 16 tokens, the model has chunks"):
        retriever_of(options, retro_data, length=8)
    other = NeighborOptions(**{**vars(options), "num_neighbors": 10**6})
    with pytest.raises(UserError, match="--num-neighbors: 1000000: more than the"):
        retriever_of(other, retro_data)
    wrong = retro_data._replace(tokenizer=retro_data.bert)
    with pytest.raises(UserError, match="embedded with another tokenizer of the datasets"):
        retriever_of(options, wrong)


@pytest.mark.parametrize(
    ("options", "architecture", "message"),
    [
        ({}, Architecture(hidden_size=64, num_attention_heads=4, num_hidden_layers=1), "has no"),
        ({"embedder": None}, SHAPE, "--embedder: missing: name the model that embedded"),
        ({"retrieved_chunks": 0}, SHAPE, "--retrieved-chunks: 0: too small; give 1 or more"),
    ],
    ids=["family", "embedder", "number"],
)
def test_options_that_do_not_fit_are_refused(
    options: dict[str, Any], architecture: Architecture, message: str
) -> None:
    given: dict[str, Any] = {"chunks": Path("chunks.json"), "embedder": Path("bert"), **options}
    with pytest.raises(UserError, match=message):
        NeighborOptions(**given).check(architecture)
    NeighborOptions().check(architecture)
