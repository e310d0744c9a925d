"""Identity of a run: the digest of settings, samples and first weights, and its record on disk.

This module imports no torch.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from tokamake import files
from tokamake.checkpoint.latest import REMEDY
from tokamake.checkpoint.native.folder import locate
from tokamake.checkpoint.native.resume_state import read_state
from tokamake.checkpoint.torch_files.dcp_metadata import SUFFIX
from tokamake.config.added_settings import without_added_defaults
from tokamake.config.resolved_run import Run, read_run
from tokamake.config.training import INDEX_SETTINGS
from tokamake.data.indexed.manifest import find_manifest
from tokamake.data.samples.sentence_masking import KEY
from tokamake.errors import UserError
from tokamake.models.common.random_weights import SCHEME
from tokamake.runtime.rank_errors import raise_on_all_ranks
from tokamake.runtime.ranks import Ranks
from tokamake.runtime.timed_rounds import in_rounds

RunRecord = dict[str, Any]
"""Data and start of a run; see `record`."""
INPUTS = "inputs"
"""Folder in the output folder of a run, with a record for each digest that the run has had."""
_RECORD_KEYS = {"index", "datasets", "tokenizers", "weights"}
_BLOCK = 1 << 22
WITHOUT_EFFECT = {
    "on_change",
    "init_timeout_seconds",
    "train_timeout_seconds",
    "on_bad_step",  # its effect, if there is any, is in the checkpoint's state.json
    "verify_data",
    "log_interval",
    "log_style",
    "log_settings",
    "trackers",
    "profile_steps",
    "log_layer_norms",
    "log_corpus_losses",
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
    "pack_samples",
    "backend",
    "zero_stage",
    "offload_optimizer",
    "offload_param",
    "deepspeed",
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
    """
    settings = effective_settings(run)
    return files.digest(
        {
            **settings,
            "train": without_added_defaults(settings["train"]),
            "index": training_index(index),
            "weights": weights,
        }
    )


def training_index(index: dict[str, Any]) -> dict[str, Any]:
    """The part of index.json that decides the training samples."""
    split = index["splits"]["train"]
    # An index of the objective causal names none.
    keys = [*("version", "seed", *INDEX_SETTINGS), *({KEY} & index.keys())]
    return {
        "settings": {key: index[key] for key in keys},
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


# ---- Record ----


def record(run: Run, *, index: dict[str, Any], weights: str) -> RunRecord:
    """Data and start of a run: they decide its weights, besides its settings."""
    samples = training_index(index)
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


# ---- First weights ----


def weights_digest(
    checkpoint: Path | None,
    ranks: Ranks,
    *,
    note: Path | None = None,
    beat: Callable[[], object] = lambda: None,
) -> str:
    """Hash of the weights that a run starts from; all ranks call this together.

    Random weights follow from settings that the run's digest holds, and from the way to draw them.
    For a checkpoint of a tokamake run, hash the run's digest, the step, and the changes and bad
    steps until there, and read no weights. For other checkpoints, hash all bytes; ranks share the
    files.

    Args:
        checkpoint: its folder, or one whose `latest` names it; None: the weights are random.
        note: file that keeps the hash; bytes are read again only if sizes or times of files change.
    """
    if checkpoint is None:
        return files.digest({"random_weights": SCHEME})
    import torch.distributed as dist  # here, because the workflow imports this module

    # Only rank 0 looks at the folder: other hosts may still see an older state of it.
    agreed: list[Any] = [None, None]
    with raise_on_all_ranks():
        if ranks.rank == 0:
            agreed = [*_known_digest(locate(checkpoint), checkpoint, note=note)]
    dist.broadcast_object_list(agreed, src=0)
    digest: str | None
    stats: list[Any]
    digest, stats = agreed
    if digest is not None:
        return digest
    paths = [Path(path) for path, *_ in stats]
    by_size = sorted(range(len(paths)), key=lambda number: -stats[number][1])
    own = [paths[number] for number in by_size[ranks.rank :: ranks.world_size]]
    hashes = dict(chain.from_iterable(in_rounds(_hashes(own), ranks, beat=beat)))
    digest = files.digest([hashes[path] for path in paths])
    with raise_on_all_ranks():
        if note and ranks.rank == 0:
            files.write_json(note, {"files": stats, "digest": digest})
    return digest


def _known_digest(
    folder: Path, checkpoint: Path, *, note: Path | None
) -> tuple[str | None, list[list[Any]]]:
    """Digest of a checkpoint if no weights have to be read for it, else None.

    Returns:
        The digest; path, size and time of the last change (ns) of each file to read.
    """
    if state := read_state(folder):
        lineage = {"lineage": state.lineage} if state.lineage else {}
        bad_steps = state.guard.effect(state.step)
        known = {"run": state.digest, "step": state.step, **lineage, **bad_steps}
        return files.digest(known), []
    paths = sorted(folder.glob(f"*{SUFFIX}"))
    if not paths:
        raise UserError(f"{checkpoint}: holds no weights in tokamake's own format; {REMEDY}")
    stats = [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in paths]
    noted = _read_note(note) if note else {}
    return (str(noted["digest"]) if noted.get("files") == stats else None), stats


def _read_note(note: Path) -> dict[str, Any]:
    """Content of a note; empty if it is missing or damaged: it only saves time."""
    try:
        noted = files.read_json(note, "")
    except UserError:
        return {}
    return noted if isinstance(noted, dict) and "digest" in noted else {}


def _hashes(paths: list[Path]) -> Iterator[tuple[Path, str] | None]:
    """SHA-256 of each file, in hexadecimal; None after each block that is read."""
    buffer = memoryview(bytearray(_BLOCK))
    for path in paths:
        digest = hashlib.sha256()
        with path.open("rb", buffering=0) as stream:
            while count := stream.readinto(buffer):
                digest.update(buffer[:count])
                yield None
        yield path, digest.hexdigest()
