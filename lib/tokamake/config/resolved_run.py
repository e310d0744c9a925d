"""A run ready to start: what `resolve` writes and `tokamake train` reads."""

import os
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import Field

from tokamake import files
from tokamake.config.architecture import Architecture
from tokamake.config.fields import Settings
from tokamake.config.training import TrainSettings
from tokamake.errors import UserError
from tokamake.validation import read_yaml, validate


class ResolvedTrainSettings(TrainSettings):
    """Training settings whose length is known."""

    train_steps: Annotated[int, Field(ge=1)]
    """Optimizer steps of the whole run."""
    train_samples: None = None
    """Has become `train_steps`."""
    train_tokens: None = None
    """Has become `train_steps`."""


class Run(Settings):
    """A training run ready to start: what `resolve` writes and `tokamake train --config` reads."""

    run: str
    """Name of the run."""
    seed: int
    """Seed of everything random."""
    checkpoint: Path
    """Checkpoint that the run starts from: its folder, or one with a file `latest`."""
    step: Annotated[int, Field(ge=0)] = 0
    """Steps that the checkpoint was trained for, where the run continues it."""
    consumed_samples: Annotated[int, Field(ge=0)] = 0
    """Samples of these steps."""
    index: Path
    """Folder of sample indexes and blend that `index` made."""
    data_root: Path
    """Folder that the index's data prefixes are relative to."""
    tokenizer: Path | None = None
    """Tokenizer of the pairs, which fill-in-the-middle needs."""
    eod: int | None = None
    """Token that ends a document, where settings about documents in a sample need it."""
    output: Path
    """Folder of the run's checkpoints, metrics.jsonl and TensorBoard events."""
    architecture: Architecture
    """Shape of the model, taken from the checkpoint."""
    train: ResolvedTrainSettings
    """Training settings."""


ROOT_VARIABLE = "TOKAMAKE_DATA_ROOT"
"""Environment variable that names the folder which prefixes of pairs are relative to."""


def read_run(path: Path) -> Run:
    """Read a resolved run, as `resolve` writes it; its data may have moved to another root."""
    value = read_yaml(path, "make it with `tokamake resolve`")
    if isinstance(value, dict) and not value.keys() & {"architecture", "index", "output"}:
        raise UserError(
            f"{path}: is no resolved run; give the run.yaml in the run's folder of results, which "
            "the workflow makes of its config"
        )
    run = validate(Run, value, str(path))
    named = os.environ.get(ROOT_VARIABLE)
    return run.model_copy(update={"data_root": Path(named)}) if named else run


def write_run(path: Path, run: Run) -> None:
    """Write a resolved run as YAML, every default spelled out."""
    files.write_text(path, yaml.safe_dump(run.model_dump(mode="json"), sort_keys=False))
