"""A user's folder whose runs pretrain a small BERT and finetune it."""

import json
from pathlib import Path
from typing import Any

import yaml

from tests.support.finetunes import planted_rows, write_rows
from tests.support.workflow_configs import train
from tests.support.workflows import ARCHITECTURE, CONFIG, make_workspace

TASK = {"name": "labeled_text", "labels": ["no", "yes"], "second_key": "other"}
SECTIONS: dict[str, Any] = {
    "tokenizer": {"kind": "wordpiece", "vocab_size": 500},
    "tokenize": {"split_sentences": True, "append_eod": False},
    "train": train(
        objective="masked",
        sequence_length=64,
        train_steps=12,
        schedule={"name": "linear", "warmup_fraction": 0.1},
    ),
}
ROW = {
    "model.checkpoint": "{run: bert}",
    "finetune.task": json.dumps(TASK),
    "finetune.train_files": "train.jsonl",
    "finetune.validation_files": "dev.jsonl",
    "finetune.test_files": "{dev: dev.jsonl, other: [other.jsonl]}",
    "finetune.epochs": "2",
    "train.global_batch_size": "8",
}


def make_finetune_workspace(
    folder: Path, *, sections: dict[str, Any] | None = None, **cells: str
) -> Path:
    """Make a workspace with a run `bert` that pretrains, and a run `order` that finetunes.

    `cells` of the second run have `__` for a dot.
    """
    make_workspace(folder)
    architecture = {**ARCHITECTURE, "family": "bert", "num_key_value_heads": 4}
    (folder / "architecture.yaml").write_text(yaml.safe_dump(architecture))
    row = {**ROW, **{name.replace("__", "."): cell for name, cell in cells.items()}}
    lines = [["run", *row], ["bert", *[""] * len(row)], ["order", *row.values()]]
    (folder / "runs.tsv").write_text("".join("\t".join(line) + "\n" for line in lines))
    for seed, (name, number) in enumerate({"train": 24, "dev": 9, "other": 5}.items()):
        write_rows(folder / f"{name}.jsonl", planted_rows(number + 1, seed)[:number])
    config = {**CONFIG, **SECTIONS, "runs": "runs.tsv", **(sections or {})}
    config.pop("run")
    (folder / "my.yaml").write_text(yaml.safe_dump(config))
    return folder
