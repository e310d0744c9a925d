"""A folder in which one command trains a biencoder on real text and measures its recall.

Passages and questions are made of Python's documentation: the first line of a docstring is the
question, the rest is the passage, and its second line is the answer. No other passage has this
answer. A second run has random weights: its learning rate is nearly 0.
"""

import gzip
import json
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tests.support.paths import ROOT

RANDOM, TRAINED = "random", "trained"
"""Runs of the table."""
STEPS, BATCH, LENGTH = 300, 128, 64
"""Training that takes minutes on two cores."""
_RUNS = {
    RANDOM: {"train.train_steps": "1", "train.optimizer.learning_rate": "1.0e-30"},
    TRAINED: {},
}


class Recalls(NamedTuple):
    """Recall@20 on the questions."""

    random: float
    trained: float
    bm25: float
    num_questions: int
    num_passages: int


def make_retriever_workspace(
    folder: Path,
    *,
    file_bytes: int = 1_000_000,
    steps: int = STEPS,
    batch: int = BATCH,
    length: int = LENGTH,
) -> Path:
    """Write config and tables; two ranks share a batch.

    Args:
        file_bytes: of each of two files of texts.
        batch: blocks that a query chooses from.
        length: most tokens of a text.
    """
    for name in ("workflow", "profiles", "config"):
        (folder / name).symlink_to(ROOT / name)
    columns = [*_RUNS[RANDOM]]
    rows = [["run", *columns], *([n, *(r.get(c, "") for c in columns)] for n, r in _RUNS.items())]
    (folder / "runs.tsv").write_text("".join("\t".join(row) + "\n" for row in rows))
    row = "docs\tresults/raw/docs/*\ttext,src\t1\n"
    (folder / "corpora.tsv").write_text("corpus\tfiles\ttext_key\tweight\n" + row)
    config = {
        "runs": "runs.tsv",
        "corpora": "corpora.tsv",
        "sample_corpus": {"docs": {"num_files": 2, "file_bytes": file_bytes}},
        "tokenizer": {"kind": "wordpiece", "vocab_size": 8192},
        "tokenize": {"split_sentences": True, "append_eod": False, "empty_documents": "keep"},
        "model": {"architecture": "config/models/tiny-biencoder.yaml"},
        "train": {
            "objective": "ict",
            "ict": {"titles": "src", "score_scaling": True},
            "sequence_length": length,
            "micro_batch_size": batch // 2,
            "global_batch_size": batch,
            "train_steps": steps,
            "split": "95,5,0",
            "optimizer": {"learning_rate": 1e-3},
            "schedule": {"warmup_fraction": 0.1},
        },
        "retrieval": {"passages": "passages.jsonl", "questions": "questions.jsonl", "top_k": 20},
    }
    (folder / "my.yaml").write_text(yaml.safe_dump(config))
    return folder


def write_questions(folder: Path) -> None:
    """Write passages and questions, once the raw files exist."""
    passages, questions, seen = list[dict[str, Any]](), list[dict[str, Any]](), set[str]()
    for path in sorted((folder / "results/raw/docs").iterdir()):
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        for document in map(json.loads, text.splitlines()):
            lines = [line.strip() for line in document["text"].splitlines() if line.strip()]
            if len(lines) > 3 and lines[0] not in seen and len(lines[0].split()) > 3:
                seen.add(lines[0])
                number = len(passages)
                passage = {"id": number, "title": document["src"], "text": " ".join(lines[1:])}
                passages.append(passage)
                questions.append({"question": lines[0], "answers": [lines[1]]})
    # Random vectors find an answer that many passages have, such as "Args:".
    texts = [passage["text"] for passage in passages]
    questions = [
        each for each in questions if sum(each["answers"][0] in text for text in texts) == 1
    ]
    for name, values in (("passages", passages), ("questions", questions)):
        lines = [json.dumps(value) + "\n" for value in values]
        (folder / f"{name}.jsonl").write_text("".join(lines))


def recalls(folder: Path) -> Recalls:
    """Read the recall of both runs and of BM25."""
    folders = [f"{RANDOM}/retrieval", f"{TRAINED}/retrieval", "data/bm25"]
    paths = [folder / f"results/{each}/recall/questions.json" for each in folders]
    found = [json.loads(path.read_text())["recall"]["20"] for path in paths]
    lines = [(folder / f"{name}.jsonl").read_text() for name in ("questions", "passages")]
    return Recalls(*found, *(text.count("\n") for text in lines))
