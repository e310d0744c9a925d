"""Identity of a run: the digest of its settings, samples and first weights; its record on disk.

This module imports no torch.
"""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tokamake import files
from tokamake.checkpoint.native.resume_state import read_state
from tokamake.config.objective import SECTIONS, objective_data, objective_section
from tokamake.config.resolved_run import Run, read_run
from tokamake.config.training import INDEX_SETTINGS, TrainSettings, without_added_defaults
from tokamake.data.indexed.manifest import find_manifest
from tokamake.data.samples.sentence_masking import KEY
from tokamake.errors import UserError

RunRecord = dict[str, Any]
"""Data and start of a run; see `record`."""
INPUTS = "inputs"
"""Folder in the output folder of a run, with a record for each digest that the run has had."""
_RECORD_KEYS = {"index", "datasets", "tokenizers", "weights"}
WITHOUT_EFFECT = {
    *("on_change", "init_timeout_seconds", "train_timeout_seconds", "verify_data"),
    "verify_interval",
    "on_bad_step",  # its effect, if there is any, is in the checkpoint's state.json
    *("log_interval", "log_style", "log_settings", "log_layer_norms", "log_corpus_losses"),
    *("trackers", "profile_steps", "segment_steps", "evaluation_interval", "evaluation_steps"),
    *("sample_interval", "sample_prompts", "sample_tokens", "sample_temperature"),
    *("save_interval", "keep_last", "keep_every", "keep_best"),
    "split",  # its effect is in the digest of the index
    # How ranks share the work changes nothing but the order of sums.
    *("micro_batch_size", "pack_samples", "parallel", "backend", "deepspeed"),
    *("zero_stage", "offload_optimizer", "offload_param", "compile", "deterministic"),
    *("recompute_granularity", "recompute_method", "recompute_num_layers"),
}
"""Training settings that a run may change and still resume."""


def run_digest(run: Run, *, index: dict[str, Any], weights: str) -> str:
    """Hash of all that decides a run's weights: settings, training samples, initial weights.

    Leaves out paths, the run's name and settings that change no weights.
    """
    settings = effective_settings(run)
    return files.digest(
        {
            **settings,
            "train": without_added_defaults(settings["train"]),
            "index": _training_data(run, index),
            "weights": weights,
        }
    )


def _training_data(run: Run, index: dict[str, Any]) -> dict[str, Any]:
    """`training_index`, and further data of the samples, such as neighbors."""
    objective = objective_data(run.train.objective)
    return {**training_index(index), **objective.further_data(run.index, index)}


def training_index(index: dict[str, Any]) -> dict[str, Any]:
    """The part of index.json that decides the training samples."""
    split = index["splits"]["train"]
    # An index of the objective causal names none.
    keys = [*("version", "seed", *INDEX_SETTINGS), *({KEY} & index.keys())]
    return {
        "settings": {key: index[key] for key in keys},
        "pairs": {
            prefix: index["pairs"][prefix]
            for file in split["files"]
            for prefix in (file["prefix"], file.get("companion"))
            if prefix
        },
        "train": split,
    }


def effective_settings(run: Run) -> dict[str, Any]:
    """Settings that decide a run's weights."""
    return {
        "step": run.step,
        "seed": run.seed,
        "architecture": run.architecture.model_dump(mode="json"),
        "train": weight_settings(run.train),
    }


def weight_settings(train: TrainSettings) -> dict[str, Any]:
    """Settings of `train` that decide weights; the section of its objective has its defaults."""
    settings = train.model_dump(mode="json", exclude={*WITHOUT_EFFECT, *SECTIONS})
    if train.objective in SECTIONS:
        section = objective_section(train)
        left_out = {*section.without_effect}
        settings[train.objective] = section.model_dump(mode="json", exclude=left_out)
    return settings


# ---- Record ----


def record(run: Run, *, index: dict[str, Any], weights: str) -> RunRecord:
    """Data and start of a run: they decide its weights, besides its settings."""
    samples = _training_data(run, index)
    return {
        "index": samples,
        "datasets": [*index["pairs"]],
        "tokenizers": tokenizers_of(samples["pairs"], run.data_root),
        "weights": weights,
    }


def tokenizers_of(prefixes: Iterable[str], data_root: Path) -> list[str]:
    """Fingerprints of the tokenizers of datasets, as their manifests state them."""
    manifests = (find_manifest(data_root / prefix) for prefix in prefixes)
    return sorted({each["tokenizer"] for each in manifests if each and "tokenizer" in each})


def write_record(output: Path, digest: str, *, content: RunRecord) -> None:
    """Keep the record of a run in its output folder."""
    path = record_path(output, digest)
    path.parent.mkdir(exist_ok=True)
    files.write_json(path, content)


def read_record(output: Path, digest: str) -> RunRecord | None:
    """Read the record of a run with a digest; None: there is none, or it is damaged."""
    try:
        value = files.read_json(record_path(output, digest), "")
    except UserError:
        return None
    is_whole = isinstance(value, dict) and value.keys() == _RECORD_KEYS
    return value if is_whole else None


def record_path(output: Path, digest: str) -> Path:
    """File with the record of a run with a digest."""
    return output / INPUTS / f"{digest[:16]}.json"


def trained_run(output: Path, digest: str) -> Run | None:
    """The run of the checkpoints with a digest in an output folder; None: none has a run.yaml."""
    for folder in sorted(output.glob("global_step*"), reverse=True):
        with suppress(UserError):
            state = read_state(folder, thorough=True)
            if state and state.digest == digest:
                return read_run(folder / "run.yaml")
    return None
