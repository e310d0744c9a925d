"""Tiny question files, and runs of a biencoder that learns them."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.biencoders import Oracle, biencoder
from tests.support.finetunes import SMALL, TRAIN, WORDS, write_vocabulary
from tests.support.hf_folder import from_hf
from tests.support.runs import write_start
from tokamake.config.architecture import Architecture
from tokamake.finetune.finetune_run import FinetuneRun, read_finetune_run
from tokamake.finetune.prepare_finetune import prepare_finetune

SGD = {
    "optimizer": {"name": "sgd", "learning_rate": 0.05, "momentum": 0.0, "weight_decay": 0.0},
    "schedule": {"name": "constant"},
    "gradient_clipping": 0.0,
    "micro_batch_size": 1,
    "global_batch_size": 8,
}


def small_biencoder(**values: Any) -> Architecture:
    return biencoder(**SMALL | {"projection_dim": 12} | values)


def questions(number: int, seed: int) -> list[dict[str, Any]]:
    """Rows as DPR has them: a positive has the words of its question.

    Neighbouring rows share a positive, or one's positive is a hard negative of the other; some rows
    have the same question, several positives, few negatives or none.
    """
    generator = np.random.default_rng(seed)

    def text(*words: str) -> str:
        return " ".join(generator.permutation([*words, *generator.choice(WORDS[4:], 4)]))

    rows: list[dict[str, Any]] = []
    for count in range(number):
        words = [str(word) for word in generator.choice(WORDS[4:], 2, replace=False)]
        contexts = [{"title": words[0], "text": text(*words)} for _ in range(1 + count % 3)]
        row = {
            "question": " ".join(words),
            "answers": ["none"],
            "positive_ctxs": contexts,
            "hard_negative_ctxs": [{"title": None, "text": text()} for _ in range(count % 4)],
            "negative_ctxs": [{"text": text()}] * (count % 2),
        }
        if rows and count % 5 == 1:
            row["positive_ctxs"] = [*contexts, rows[-1]["positive_ctxs"][0]]
        if rows and count % 5 == 2:
            row["hard_negative_ctxs"] = [rows[-1]["positive_ctxs"][0], contexts[-1]]
        if rows and count % 5 == 3:
            row["question"] = rows[-1]["question"]
        rows.append(row)
    return rows


def write_questions(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text(json.dumps(rows))
    return str(path)


def prepare_questions(
    root: Path,
    name: str = "run",
    *,
    rows: tuple[int, int] = (19, 7),
    shape: Architecture | None = None,
    task: dict[str, Any] | None = None,
    epochs: int = 1,
    **changes: Any,
) -> FinetuneRun:
    """Prepare a run that learns questions; `changes` are settings of `train`."""
    folder, start = root / name, root / "pretrained"
    folder.mkdir(parents=True)
    shape = shape or small_biencoder()
    if not start.exists():
        write_start(start, shape, from_hf(shape, dict(Oracle(shape).named_parameters())))
    files = {
        f"{split}_files": write_questions(root / f"{split}.json", questions(number, seed))
        for seed, (split, number) in enumerate(zip(("train", "validation"), rows, strict=True))
    }
    finetune = {"task": {"name": "retrieval", **(task or {})}, "epochs": epochs, **files}
    prepare_finetune(
        checkpoint=start,
        settings=json.dumps(finetune),
        train=json.dumps({**TRAIN, "sequence_length": 16, **changes}),
        run=name,
        seed=3,
        tokenizer=write_vocabulary(root),
        output_folder=folder / "training",
        start=folder / "start",
        output=folder / "run.yaml",
    )
    return read_finetune_run(folder / "run.yaml")
