"""A synthetic finished run: metadata, metrics, scores, samples, settings and index."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import yaml

from tokamake.data.indexed.length_histogram import histogram
from tokamake.data.samples.index_folder import VERSION
from tokamake.files import digest

RUN = {
    "run": "trial",
    "seed": 1,
    "checkpoint": "init",
    "index": "index",
    "data_root": "data",
    "output": "training",
    "architecture": {
        "vocab_size": 1000,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "train": {
        "train_steps": 50,
        "global_batch_size": 4,
        "sequence_length": 64,
        "split": "80,10,10",
    },
}
TRAINED = {
    "step": 50,
    "first_loss": 6.9,
    "last_loss": 3.1234,
    "validation_losses": [{"step": 50, "validation_loss": 3.25}],
    "consumed_tokens": 12800,
    "seconds": 65.4,
    "tokens_per_second": 195.7,
    "checkpoint": "training/global_step50",
    "world_size": 2,
    "versions": {"tokamake": "9.9.9", "torch": "2.0"},
}


def pair(prefix: str, corpus: str, num_tokens: int) -> dict:
    # Nine documents of equal length, and one with the remaining tokens.
    lengths = np.array([num_tokens // 16] * 9 + [num_tokens - 9 * (num_tokens // 16)])
    return {
        "data_prefix": prefix,
        "corpus": corpus,
        "total_num_docs": 10,
        "total_num_tokens": num_tokens,
        "text_bytes": 4 * num_tokens,
        "documents_in": 1013,
        "empty_documents": 1,
        "duplicate_documents": 1000,
        "quarantined_documents": 2,
        "lengths": histogram([lengths]),
    }


_GONE = "responses with HTTP status 404 (Not Found)"
WEB = {
    "near_duplicate_documents": 60,
    "sources": [{"inputs": [{"skipped": {"redirects": 3, _GONE: 1}}, {"skipped": {_GONE: 3}}]}],
}
"""Further counts of a dataset: near-duplicates, and records that are no documents."""


def scores(loss: float | None) -> dict:
    keys = {"documents": 3, "tokens": 1234, "bytes": 4936}
    return keys | dict.fromkeys(("loss", "perplexity", "bits_per_byte"), loss)


def metric(step: int, loss: float) -> dict:
    return {
        "step": step,
        "loss": loss,
        "learning_rate": 1e-3 / step,
        "grad_norm": 1.0,
        "tokens_per_second": 100.0 + step,
        "consumed_tokens": step * 256,
    }


def make_inputs(folder: Path) -> dict[str, Path]:
    """Write the files of a finished run to a folder; returns their paths."""
    lines = [metric(step, 3 + 4 / step) for step in range(5, 51, 5)]
    lines += [{"step": 25, "validation_loss": 3.5}, {"step": 50, "validation_loss": 3.25}]
    content = {
        "metadata": json.dumps(
            [
                pair("merged/code-0000", "code", 4000) | WEB,
                pair("merged/code-0001", "code", 2000),
                pair("merged/a&b-0000", "a&b", 2000),
            ]
        ),
        "metrics": "".join(json.dumps(line) + "\n" for line in lines),
        "train": json.dumps(TRAINED),
        "evaluation": json.dumps(
            {"overall": scores(2.5), "corpora": {"code": scores(2.5), "a&b": scores(None)}}
        ),
        "samples": json.dumps(
            [
                {
                    "prompt": "<b>",
                    "text": "x < y\n  & z</div>",
                    "num_new_tokens": 7,
                    "stopped": "eod",
                }
            ]
        ),
        "config": yaml.safe_dump(RUN),
    }
    for name, text in content.items():
        (folder / name).write_text(text)
    write_index(
        folder / "index",
        {
            "merged/code-0000": ("code", 3200, 34),
            "merged/code-0001": ("code", 1600, 17),
            "merged/a&b-0000": ("a&b", 1600, 153),
        },
    )
    return {name: folder / name for name in [*content, "index"]}


def write_index(folder: Path, files: dict[str, tuple[str, int, int]]) -> None:
    """Describe an index that draws samples from files of some tokens each."""
    keys = ("corpus", "tokens", "drawn_samples")
    described = [
        {"prefix": prefix, **dict(zip(keys, file, strict=True))} for prefix, file in files.items()
    ]
    value = {"version": VERSION, "splits": {"train": {"files": described}}}
    folder.mkdir(exist_ok=True)
    whole = {**value, "digest": digest(value)}
    (folder / "index.json").write_text(json.dumps(whole))


def make_results(folder: Path, runs: Sequence[str] = ("trial",), num_steps: int = 50) -> Path:
    """Write a results folder: finished runs on the same data, each with another learning rate."""
    (folder / "data").mkdir(parents=True)
    for number, name in enumerate(runs):
        (folder / name / "training").mkdir(parents=True)
        inputs = make_inputs(folder / name)
        train = {**RUN["train"], "train_steps": num_steps}
        train["optimizer"] = {"name": "adamw", "learning_rate": 0.001 * (number + 1)}
        run = {**RUN, "run": name, "data_root": "results/data", "train": train}
        (folder / name / "run.yaml").write_text(yaml.safe_dump(run))
        for source, target in FILES.items():
            inputs[source].rename(folder / name / target)
        (folder / name / "config").unlink()
        (folder / name / "metadata").rename(folder / "data/metadata.json")
        if num_steps != 50:
            lines = (json.dumps(metric(step, 3 + 4 / step)) for step in range(1, num_steps + 1))
            (folder / name / "training/metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


FILES = {
    "metrics": "training/metrics.jsonl",
    "train": "train.json",
    "evaluation": "evaluate.json",
    "samples": "samples.json",
}
"""Names of the files of `make_inputs` in the folder of a run."""
