"""Tiny tasks for tests: a vocabulary of words, files of rows, a BERT to finetune."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.support.berts import bert
from tests.support.random_tensors import random_tensors
from tests.support.runs import write_start
from tokamake.config.architecture import Architecture
from tokamake.finetune.finetune import finetune_run
from tokamake.finetune.finetune_run import FinetuneRun, read_finetune_run
from tokamake.finetune.prepare_finetune import prepare_finetune
from tokamake.runtime.process_group import process_group
from tokamake.runtime.ranks import Ranks

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = ("a", "b", "x", "y", *(f"w{number}" for number in range(15)))
TASK = {"name": "labeled_text", "labels": ["no", "yes"], "second_key": "other"}
TRAIN = {
    "sequence_length": 16,
    "micro_batch_size": 2,
    "global_batch_size": 6,
    "optimizer": {"learning_rate": 0.003},
    "schedule": {"name": "linear", "warmup_fraction": 0.1},
    "log_interval": 1,
}


SMALL = {
    "vocab_size": len(SPECIAL) + len(WORDS),
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "max_position_embeddings": 32,
}
"""A shape of BERT or its towers."""


def small_bert(**values: Any) -> Architecture:
    return bert(**SMALL | values)


def write_vocabulary(folder: Path) -> Path:
    """Write a BERT tokenizer whose tokens are words."""
    path = folder / "vocab.txt"
    path.write_text("\n".join([*SPECIAL, *WORDS]) + "\n")
    return path


def planted_rows(number: int, seed: int) -> list[dict[str, str]]:
    """Rows of the task whether `x` is in the first text and `y` in the second one, or swapped.

    Each row has a twin with both texts exchanged and the other label. As bags of words, twins are
    equal: no classifier of bags has a better accuracy than 0.5.
    """
    generator = np.random.default_rng(seed)
    rows = []
    for _ in range(number // 2):
        texts = []
        for marker in ("x", "y"):
            words = [*generator.choice(WORDS[4:], 3), marker]
            texts.append(" ".join(generator.permutation(words)))
        rows.append({"text": texts[0], "other": texts[1], "label": "yes"})
        rows.append({"text": texts[1], "other": texts[0], "label": "no"})
    return rows


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def prepare(
    root: Path,
    name: str = "task",
    *,
    rows: tuple[int, int] = (40, 17),
    task: dict[str, Any] | None = None,
    **changes: Any,
) -> FinetuneRun:
    """Prepare a run of the planted task in a folder; `changes` are settings of `train`."""
    folder = root / name
    folder.mkdir(parents=True)
    pretrained = root / "pretrained"
    if not pretrained.exists():
        write_start(pretrained, small_bert(), random_tensors(small_bert(), 5))
    files = {
        f"{split}_files": write_rows(
            root / f"{split}.jsonl", planted_rows(number + 1, seed)[:number]
        )
        for seed, (split, number) in enumerate(zip(("train", "validation"), rows, strict=True))
    }
    finetune = {"task": TASK, "epochs": 2, **files, **(task or {})}
    prepare_finetune(
        checkpoint=pretrained,
        settings=json.dumps(finetune),
        train=json.dumps({**TRAIN, **changes}),
        run=name,
        seed=3,
        tokenizer=write_vocabulary(root),
        output_folder=folder / "training",
        start=folder / "start",
        output=folder / "run.yaml",
    )
    return read_finetune_run(folder / "run.yaml")


def run_here(run: FinetuneRun, **options: Any) -> dict[str, Any]:
    """Train a run in this process; return finetune.json."""
    ranks, folder = Ranks(0, 1, 0, 1), run.output.parent
    with process_group(ranks) as device:
        code = finetune_run(
            run,
            ranks,
            device=device,
            output=folder / "finetune.json",
            model=folder / "finetuned",
            **options,
        )
    if code:
        return {"code": code}
    result: dict[str, Any] = json.loads((folder / "finetune.json").read_text())
    return result


def run_on_rank(run: FinetuneRun) -> None:
    """Train a run on a rank of `tests.support.ranks.spawn`."""
    import os

    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ["LOCAL_RANK"] = str(rank)
    folder = run.output.parent
    finetune_run(
        run,
        Ranks(rank, size, rank, size),
        device=torch.device("cpu"),
        output=folder / "finetune.json",
        model=folder / "finetuned",
    )
