"""Results of a finetuned run: the scores of its epochs, and the checkpoint of the best one."""

import os
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tokamake import files
from tokamake.finetune.finetune_run import FinetuneRun
from tokamake.finetune.trainer import FinetuneTrainer


def write_results(trainer: FinetuneTrainer, run: FinetuneRun, *, output: Path, model: Path) -> None:
    """Link the best checkpoint to `model`, then write the file that says the run is finished."""
    _link(trainer.best_checkpoint(), model)
    files.write_json(output, summary(trainer, run))


def summary(trainer: FinetuneTrainer, run: FinetuneRun) -> dict[str, Any]:
    """Content of finetune.json."""
    task, history = run.finetune.task, trainer.history
    best = history.best(task.metrics[0])
    assert best is not None, "an epoch has ended"
    return {
        "run": run.run,
        "task": task.name,
        "head": task.head,
        "labels": task.labels,
        "metrics": task.metrics,
        "digest": trainer.state.digest,
        "rows": {"train": len(trainer.data.train), "validation": len(trainer.data.validation)},
        "epochs": [record._asdict() for record in history.epochs],
        "best": best._asdict(),
        "pretrained": str(run.pretrained),
        "seconds": trainer.state.seconds,
        "world_size": trainer.state.world_size,
        "versions": {name: version(name) for name in ("tokamake", "torch")},
    }


def _link(folder: Path, model: Path) -> None:
    """Make a folder with hard links to the files of a checkpoint, or copies on another disk."""
    with files.atomic_folder(model, also=("global_step*",)) as growing:
        target = growing / folder.name
        target.mkdir()
        for file in folder.iterdir():
            try:
                os.link(file, target / file.name)
            except OSError:
                shutil.copyfile(file, target / file.name)
        files.write_text(growing / "latest", folder.name)
