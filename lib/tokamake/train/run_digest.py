"""Which run a checkpoint belongs to: hashes of settings, training samples and first weights."""

from pathlib import Path
from typing import Any

from tokamake import files
from tokamake.checkpoint.latest import REMEDY
from tokamake.checkpoint.native.folder import locate
from tokamake.config.resolved_run import Run
from tokamake.config.training import INDEX_SETTINGS, without_added_defaults
from tokamake.errors import UserError
from tokamake.train.resume_state import read_state

WITHOUT_EFFECT = {
    "on_change",
    "on_bad_step",  # its effect, if there is any, is in the checkpoint's state.json
    "verify_data",
    "log_interval",
    "save_interval",
    "keep_last",
    "keep_every",
    "keep_best",
    "segment_steps",
    "evaluation_interval",
    "evaluation_steps",
    "split",  # its effect is in the digest of the index
    # How ranks share the work changes nothing but the order of sums.
    "micro_batch_size",
    "backend",
    "zero_stage",
    "offload_optimizer",
    "offload_param",
    "parallel",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "compile",
    "deterministic",
}
"""Training settings that a run may change and still resume."""


def run_digest(run: Run, *, index: dict[str, Any], weights: str) -> str:
    """Hash of all that decides a run's weights: settings, training samples, initial weights.

    Leaves out paths, the run's name and settings that change no weights.

    Args:
        run: the resolved run.
        index: content of the index folder's index.json.
        weights: hash of the initial weights.
    """
    settings = effective_settings(run)
    return files.digest(
        {
            **settings,
            "train": without_added_defaults(settings["train"]),
            "index": training_samples(index),
            "weights": weights,
        }
    )


def training_samples(index: dict[str, Any]) -> dict[str, Any]:
    """The part of index.json that decides the training samples."""
    split = index["splits"]["train"]
    return {
        "settings": {key: index[key] for key in ("version", "seed", *INDEX_SETTINGS)},
        "pairs": {file["prefix"]: index["pairs"][file["prefix"]] for file in split["files"]},
        "train": split,
    }


def effective_settings(run: Run) -> dict[str, Any]:
    """Settings that decide a run's weights."""
    return {
        "step": run.step,
        "seed": run.seed,
        "architecture": run.architecture.model_dump(mode="json"),
        "train": run.train.model_dump(mode="json", exclude=WITHOUT_EFFECT),
    }


def weights_digest(checkpoint: Path, note: Path | None = None) -> str:
    """Hash of the weights that a run starts from.

    For a checkpoint of a tokamake run, hash the run's digest, the step, and the changes and bad
    steps until there, and read no weights. For other checkpoints, hash all bytes.

    Args:
        checkpoint: its folder, or one whose `latest` names it.
        note: file that keeps the hash; bytes are read again only if sizes or times of files change.

    Raises:
        UserError: there is no checkpoint, or its state.json is damaged.
    """
    folder = locate(checkpoint)
    if state := read_state(folder):
        lineage = {"lineage": state.lineage} if state.lineage else {}
        bad_steps = state.guard.effect(state.step)
        return files.digest({"run": state.digest, "step": state.step, **lineage, **bad_steps})
    paths = sorted(folder.glob("*.distcp"))
    if not paths:
        raise UserError(f"{checkpoint}: holds no weights in tokamake's own format; {REMEDY}")
    stats = [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in paths]
    noted = files.read_json(note, "remove it") if note and note.is_file() else {}
    if noted.get("files") == stats:
        return str(noted["digest"])
    digest = files.digest([files.sha256(path) for path in paths])
    if note:
        files.write_json(note, {"files": stats, "digest": digest})
    return digest
