"""Inputs of the stages of retrieval, so that tests can start each stage by itself."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.support import finetunes, hf_folder
from tests.support.biencoders import biencoder
from tests.support.embeddings import random_vectors, write_embeddings
from tests.support.forked import run_stage
from tests.support.random_tensors import random_tensors

PRODUCT = "product.json"
"""Manifest of each stage, in a folder of its own."""
NUM_PASSAGES, NUM_QUESTIONS = 400, 60


def _write_texts(root: Path) -> None:
    generator = np.random.default_rng(4)
    texts = [" ".join(generator.choice(finetunes.WORDS, 12)) for _ in range(NUM_PASSAGES)]
    passages = [{"id": n, "text": text, "title": ""} for n, text in enumerate(texts)]
    asked = [{"question": text[:20], "answers": [text[-20:]]} for text in texts[:NUM_QUESTIONS]]
    for name, rows in (("passages", passages), ("questions", asked)):
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _model_options(root: Path) -> list[str]:
    """Write a biencoder; return the options that name it."""
    shape = biencoder(vocab_size=len(finetunes.SPECIAL) + len(finetunes.WORDS))
    hf_folder.write(root / "model", shape, random_tensors(shape, 5))
    tokenizer = finetunes.write_vocabulary(root)
    return [f"--checkpoint={root / 'model'}", f"--tokenizer={tokenizer}", "--batch-size=8"]


def embeds(root: Path) -> Callable[[str], list[str]]:
    """Arguments of `embed-passages`, by the folder of the product."""
    _write_texts(root)
    options = [str(root / "passages.jsonl"), *_model_options(root)]
    return lambda name: ["embed-passages", *options, f"--output={root / name / PRODUCT}"]


def embeds_questions(root: Path) -> Callable[[str], list[str]]:
    _write_texts(root)
    options = [str(root / "questions.jsonl"), *_model_options(root)]
    return lambda name: ["embed-questions", *options, f"--output={root / name / PRODUCT}"]


def embeds_blocks(root: Path) -> Callable[[str], list[str]]:
    """Arguments of `embed-blocks` for a dataset of sentences with titles."""
    _write_texts(root)
    options = _model_options(root)
    dataset = ["--split-sentences", "--no-append-eod", "--empty-documents=keep", options[1]]
    keys = ["--text-key=text,title", f"--output={root / 'wiki'}"]
    tokenized = ["tokenize", str(root / "passages.jsonl"), *dataset, *keys]
    assert run_stage(tokenized, root / "log") == 0, (root / "log").read_text()
    return lambda name: [
        *("embed-blocks", str(root / "wiki_text"), *options),
        f"--output={root / name / PRODUCT}",
    ]


def indexes(root: Path) -> Callable[[str], list[str]]:
    """Arguments of `index-blocks` for an index that is trained."""
    folder = write_embeddings(root / "vectors", random_vectors(20_000, dimension=32), shards=2)
    return lambda name: [
        *("index-blocks", str(folder), "--factory=IVF64,PQ8x4"),
        f"--output={root / name / PRODUCT}",
    ]


def searches_words(root: Path) -> Callable[[str], list[str]]:
    _write_texts(root)
    inputs = [f"--{name}={root / name}.jsonl" for name in ("questions", "passages")]
    return lambda name: ["search-bm25", *inputs, f"--output={root / name / PRODUCT}"]


def searches(root: Path) -> Callable[[str], list[str]]:
    folder = write_embeddings(root / "vectors", random_vectors(20_000, dimension=32), shards=2)
    asked = write_embeddings(root / "asked", random_vectors(300, dimension=32, seed=1))
    return lambda name: [
        *("search", f"--embeddings={folder}", f"--queries={asked}", "--top-k=50"),
        f"--output={root / name / PRODUCT}",
    ]


def evaluates(root: Path) -> Callable[[str], list[str]]:
    """Arguments of `evaluate-retrieval` for a search of random vectors."""
    _write_texts(root)
    folder = write_embeddings(root / "vectors", random_vectors(NUM_PASSAGES, dimension=32))
    asked = write_embeddings(root / "asked", random_vectors(NUM_QUESTIONS, dimension=32, seed=1))
    search = ["search", f"--embeddings={folder}", f"--queries={asked}", "--top-k=20"]
    found = root / "found.json"
    assert run_stage([*search, f"--output={found}"], root / "log") == 0, (root / "log").read_text()
    inputs = [f"--{name}={root / name}.jsonl" for name in ("questions", "passages")]
    return lambda name: [
        *("evaluate-retrieval", str(found), *inputs),
        f"--output={root / name / PRODUCT}",
    ]
