"""A run that finetunes: `prepare-finetune` writes it, `finetune` reads it."""

from pathlib import Path

import yaml

from tokamake import files
from tokamake.config.architecture import Architecture
from tokamake.config.fields import Settings
from tokamake.config.finetune import TRAIN_SETTINGS, FinetuneSettings, TaskRun
from tokamake.config.objective import TaskObjectiveName
from tokamake.config.resolved_run import ResolvedTrainSettings
from tokamake.config.training import LENGTHS, TrainSettings
from tokamake.config_files import read_yaml, validate
from tokamake.errors import UserError

_NO_INDEX = Path("no-index")
"""Rows of a task are in no index."""


class _TaskTrainSettings(ResolvedTrainSettings):
    objective: TaskObjectiveName
    """Objective of the task."""


class FinetuneRun(Settings):
    """All that `tokamake finetune --config` needs."""

    run: str
    """Name of the run."""
    seed: int
    """Seed of the new head, of the order of rows and of dropout."""
    checkpoint: Path
    """Folder of the pretrained weights with the new head."""
    pretrained: Path
    """Checkpoint that these weights are from."""
    new_tensors: tuple[str, ...]
    """Tensors of the model that the pretrained one lacks; they are random."""
    dropped_tensors: tuple[str, ...]
    """Tensors of the pretrained model that this one lacks."""
    tokenizer: Path
    """Tokenizer of the model."""
    output: Path
    """Folder of the run's checkpoints."""
    architecture: Architecture
    """Shape of the model, with its head."""
    train: TrainSettings
    """Training settings, as far as finetuning uses them."""
    finetune: FinetuneSettings
    """Task, files and epochs."""

    def resolved(self, num_rows: int) -> TaskRun:
        """The run of the trainer's engine, its length given by epochs of `num_rows` rows."""
        # The last step of an epoch may have fewer rows.
        steps_per_epoch = -(-num_rows // self.train.global_batch_size)
        values = {
            **used_settings(self.train),
            "objective": self.finetune.task.objective,
            "train_steps": self.finetune.epochs * steps_per_epoch,
            "evaluation_interval": steps_per_epoch,
            "keep_last": 2,  # the last one may be damaged
            "keep_best": 1,
            "on_bad_step": {"spike": "ignore"},
        }
        return TaskRun(
            run=self.run,
            seed=self.seed,
            checkpoint=self.checkpoint,
            index=_NO_INDEX,
            data_root=Path(),
            tokenizer=self.tokenizer,
            output=self.output,
            architecture=self.architecture,
            task=self.finetune.task,
            train=validate(_TaskTrainSettings, values, f"{self.run}: train"),
        )


def used_settings(train: TrainSettings) -> dict[str, object]:
    """Settings of `train` that finetuning uses, as JSON."""
    return train.model_dump(mode="json", include={*TRAIN_SETTINGS})


def read_finetune_run(path: Path) -> FinetuneRun:
    """Read a file that `prepare-finetune` wrote."""
    value = read_yaml(path, "make it with `tokamake prepare-finetune`")
    if isinstance(value, dict) and "finetune" not in value:
        raise UserError(
            f"{path}: not a run that finetunes; give the run.yaml that `tokamake prepare-finetune` "
            "wrote, or train this run with `tokamake train`"
        )
    return validate(FinetuneRun, value, str(path))


def write_finetune_run(path: Path, run: FinetuneRun) -> None:
    """Write a run as YAML, including all defaults."""
    value = run.model_dump(mode="json")
    value["train"] = {**used_settings(run.train), **dict.fromkeys(LENGTHS)}
    files.write_text(path, yaml.safe_dump(value, sort_keys=False))
