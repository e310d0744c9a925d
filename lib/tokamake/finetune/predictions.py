"""Predictions of test sets: their scores, and files with the label of each row."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch.distributed as dist

from tokamake import files
from tokamake.config.finetune import FinetuneTask
from tokamake.errors import UserError
from tokamake.parallel.axis import Axis
from tokamake.train.objectives.classification.rows import LabeledRows
from tokamake.train.objectives.classification.scoring import (
    Forward,
    RowBatches,
    predictions,
    row_logits,
    scores,
)


def score_sets(
    forward: Forward,
    sets: dict[str, LabeledRows],
    *,
    task: FinetuneTask,
    size: int,
    folder: Path | None,
) -> dict[str, dict[str, Any]]:
    """Score test sets; all ranks of the process group call it together.

    Args:
        folder: where rank 0 writes NAME.jsonl of each test set; None: nowhere.

    Returns:
        Number of rows and metrics of each test set; no metrics without labels.

    Raises:
        UserError: a logit is not finite, or only some rows have labels.
    """
    axis, results = Axis(dist.get_rank(), dist.get_world_size()), {}
    for name, rows in sets.items():
        logits = row_logits(forward, rows, batches=RowBatches(axis, size))
        if not np.isfinite(logits).all():
            raise UserError("checkpoint: a logit is not finite; its weights are broken")
        results[name] = {"rows": len(rows), **_scores(name, logits, rows=rows, task=task)}
        if axis.rank == 0:
            shown = [f"{key} {value:.4f}" for key, value in results[name].items() if key != "rows"]
            print(f"{name}: {len(rows):,} rows, {', '.join(shown) or 'no labels'}", flush=True)
            if folder:
                _write(folder / f"{name}.jsonl", logits, task=task)
    return results


def _scores(
    name: str, logits: npt.NDArray[np.float32], *, rows: LabeledRows, task: FinetuneTask
) -> dict[str, float]:
    if not rows.num_labeled:
        return {}
    if rows.num_labeled < len(rows):
        raise UserError(
            f"{name}: {len(rows) - rows.num_labeled:,} of {len(rows):,} rows have no label, the "
            f"first is {rows.first_unlabeled}; give files in which all rows have one, or none has"
        )
    return scores(logits, rows.labels, head=task.head, names=task.metrics)


def _write(path: Path, logits: npt.NDArray[np.float32], *, task: FinetuneTask) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    for row, predicted in enumerate(predictions(logits, task.head).tolist()):
        label = predicted if task.head == "regression" else task.labels[predicted]
        lines.append(json.dumps({"row": row, "prediction": label}))
    files.write_text(path, "".join(f"{line}\n" for line in lines))
