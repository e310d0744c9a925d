"""The resolved run: `resolve` writes it, `tokamake train` reads it."""

import dataclasses
import os
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import Field, PrivateAttr

from tokamake import files
from tokamake.config.architecture import Architecture
from tokamake.config.batching import BatchSizes
from tokamake.config.data_set import data_set_in
from tokamake.config.fields import Settings
from tokamake.config.objective import objective_data
from tokamake.config.training import TrainSettings
from tokamake.config_files import read_yaml, validate
from tokamake.errors import UserError


class ResolvedTrainSettings(TrainSettings):
    """Training settings of a run of known length."""

    train_steps: Annotated[int, Field(ge=1)]
    """Optimizer steps of the whole run."""
    train_samples: None = None
    """Has become `train_steps`."""
    train_tokens: None = None
    """Has become `train_steps`."""
    _first: tuple[int, int] = PrivateAttr(default=(0, 0))

    @property
    def batch_sizes(self) -> BatchSizes:
        step, sample = self._first
        return dataclasses.replace(super().batch_sizes, first_step=step, first_sample=sample)

    def counted_from(self, step: int, samples: int) -> "ResolvedTrainSettings":
        """The settings for a run that took other settings until a step, which consumed `samples`.

        The run ends with the same number of samples. If the batch sizes differ, that is another
        number of steps.
        """
        assert self.num_samples is not None, "a resolved run has a length"
        counted = self.model_copy()
        counted._first = (step, samples)
        steps = counted.batch_sizes.whole_steps(max(self.num_samples, samples))
        return counted.model_copy(update={"train_steps": steps})


class Run(Settings):
    """A resolved run: all that `tokamake train --config` needs."""

    run: str
    """Name of the run."""
    seed: int
    """Seed of all random numbers."""
    checkpoint: Path | None = None
    """Checkpoint that the run starts from: its folder, or a folder with a file `latest`. None:
    random weights, which follow from the seed and the architecture."""
    parent: str | None = None
    """Run of the same table whose last checkpoint that is."""
    step: Annotated[int, Field(ge=0)] = 0
    """Step of the checkpoint, if the run continues its training."""
    consumed_samples: Annotated[int, Field(ge=0)] = 0
    """Samples that these steps consumed."""
    index: Path
    """Folder of sample indexes and blend that `index` wrote."""
    data_root: Path
    """Folder to which the prefixes in the index are relative."""
    tokenizer: Path | None = None
    """Tokenizer of the indexed datasets. Fill-in-the-middle needs it."""
    eod: int | None = None
    """Id of the end-of-document token. Settings about documents in a sample need it."""
    output: Path
    """Folder of the run's checkpoints, metrics.jsonl and TensorBoard events."""
    architecture: Architecture
    """Shape of the model."""
    train: ResolvedTrainSettings
    """Training settings."""

    @property
    def start(self) -> str:
        """Name of the initial checkpoint or of random weights, for messages."""
        return str(self.checkpoint) if self.checkpoint else f"random weights of seed {self.seed}"

    @property
    def data_set(self) -> str:
        """The run's `data_set`, or its data folder outside results/data."""
        folder = str(self.data_root)
        data_set = data_set_in(folder)
        return data_set.name if data_set else folder


def sample_lengths(run: Run) -> list[int]:
    """Tokens of a sample in each stack of layers; the encoder comes first."""
    return objective_data(run.train.objective).stack_lengths(run.train)


ROOT_VARIABLE = "TOKAMAKE_DATA_ROOT"
"""Environment variable with the folder to which prefixes of indexed datasets are relative."""


def divide_root(root: Path) -> tuple[str, Path]:
    """Divide OLD=NEW, a folder that has moved, into both; a folder alone has no old one."""
    old, _, new = str(root).rpartition("=")
    return (old, Path(new)) if old and not root.exists() else ("", root)


def read_run(path: Path) -> Run:
    """Read a resolved run. ROOT_VARIABLE overrides its `data_root`, for data that has moved."""
    value = read_yaml(path, "make it with `tokamake resolve`")
    if isinstance(value, dict) and not value.keys() & {"architecture", "index", "output"}:
        raise UserError(
            f"{path}: not a resolved run; give the run.yaml that the workflow writes into the "
            "results folder of the run"
        )
    run = validate(Run, value, str(path))
    root = os.environ.get(ROOT_VARIABLE)
    return run.model_copy(update={"data_root": divide_root(Path(root))[1]}) if root else run


def write_run(path: Path, run: Run) -> None:
    """Write a resolved run as YAML, including all defaults."""
    # The dumper in C is five times faster; PyYAML may be installed without it.
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    text = yaml.dump(run.model_dump(mode="json"), Dumper=dumper, sort_keys=False)
    files.write_text(path, text)
