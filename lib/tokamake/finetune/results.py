"""Results of a finetuned run: the scores of its epochs, and the checkpoint of the best one."""

import os
import shutil
from importlib.metadata import version
from pathlib import Path

from tokamake import files
from tokamake.finetune.finetune_run import FinetuneRun
from tokamake.train.objectives._epochs import EpochSampler
from tokamake.train.trainer import Trainer


def write_results(run: FinetuneRun, trainer: Trainer, *, output: Path, model: Path) -> None:
    """Link the best checkpoint to `model`, then write the file that says the run is finished."""
    sampler, state = trainer.sampler, trainer.state
    assert isinstance(sampler, EpochSampler), "objectives of tasks count epochs"
    task, history = run.finetune.task, sampler.history
    best = history.best(task.metrics[0])
    _link(run.output / f"global_step{best.step}", model)
    content = {
        "run": run.run,
        "task": task.name,
        "head": task.head,
        "labels": task.labels,
        "metrics": task.metrics,
        "digest": state.digest,
        "rows": {"train": len(sampler.data.train), "validation": len(sampler.data.validation)},
        "epochs": [record._asdict() for record in history.epochs],
        "best": best._asdict(),
        "pretrained": str(run.pretrained),
        "seconds": state.seconds,
        "world_size": state.world_size,
        "versions": {name: version(name) for name in ("tokamake", "torch")},
    }
    files.write_json(output, content)


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
