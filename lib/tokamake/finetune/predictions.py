"""Predictions of test sets: their scores, and files with the prediction of each row."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from tokamake import files
from tokamake.config.finetune import FinetuneTask
from tokamake.errors import UserError
from tokamake.parallel.axis import Axis
from tokamake.train.objectives._tasks import (
    Forward,
    RowBatches,
    RowsOfFiles,
    row_outputs,
    task_objective,
)


def score_sets(
    forward: Forward,
    sets: dict[str, RowsOfFiles],
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
        UserError: an output is not finite, or only some rows have labels.
    """
    axis, results = Axis(dist.get_rank(), dist.get_world_size()), {}
    objective = task_objective(task.objective)
    for name, rows in sets.items():
        outputs = row_outputs(forward, rows, batches=RowBatches(axis, size))
        if not np.isfinite(outputs).all():
            raise UserError(
                "checkpoint: an output of the model is not finite; its weights are broken"
            )
        scores = objective.row_scores(outputs, rows, task=task) if _is_labeled(name, rows) else {}
        results[name] = {"rows": len(rows), **scores}
        if axis.rank == 0:
            shown = [f"{key} {value:.4f}" for key, value in scores.items()]
            print(f"{name}: {len(rows):,} rows, {', '.join(shown) or 'no labels'}", flush=True)
            if folder:
                predicted = objective.row_predictions(outputs, rows, task=task)
                _write(folder / f"{name}.jsonl", predicted)
    return results


def _is_labeled(name: str, rows: RowsOfFiles) -> bool:
    if 0 < rows.num_labeled < len(rows):
        raise UserError(
            f"{name}: {len(rows) - rows.num_labeled:,} of {len(rows):,} rows have no label, the "
            f"first is {rows.first_unlabeled}; give files in which all rows have one, or none has"
        )
    return rows.num_labeled > 0


def _write(path: Path, predicted: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_text(path, "".join(f"{json.dumps(row)}\n" for row in predicted))
