"""Where the workflow's files are, relative to its working directory."""

from pathlib import Path

from tokamake.data.mixture.weigh import split_weights_path

DATA = "results/data"
"""Data that all runs share."""
RUN = "results/{run}"
"""Folder of a run."""
WEIGHTS = f"{DATA}/{{run}}.weights.txt"
"""Weighting file of a run's training split."""
PLAN = f"{DATA}/plan.json"
METADATA = f"{DATA}/metadata.json"
DOCTOR = "results/doctor"
HF_FILES = ("config.json", "model.safetensors")
"""Files of a Hugging Face checkpoint with random weights."""


def batch_file(stage: str, batch: str) -> str:
    """File that `tokenize` or `merge` writes when all datasets of a job batch are complete."""
    return f"{DATA}/batches/{stage}/{batch}.json"


def split_weights(split: str) -> str:
    """Weighting file of a split other than the training split."""
    return str(split_weights_path(Path(WEIGHTS), split))


def corpus_of(batch: str) -> str:
    """Name of the corpus that a job batch belongs to."""
    return batch.rpartition("-")[0]
