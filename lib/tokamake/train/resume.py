"""Where a run begins or resumes, and how a new checkpoint takes its place, complete or not at all.

The output folder holds global_step<N>/ folders and a file `latest` that names one of them. Each
folder has a state.json that names the run by its digest. A back end writes a new checkpoint inside
`SAVING`; `commit` moves it into place.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from tokamake import files
from tokamake.checkpoint.latest import REMEDY, latest
from tokamake.checkpoint.native.folder import check_files, locate
from tokamake.config.resolved_run import Run, read_run
from tokamake.config.training import INDEX_SETTINGS
from tokamake.errors import UserError
from tokamake.runtime.rank_errors import raise_on_all_ranks
from tokamake.runtime.ranks import Ranks
from tokamake.train import metrics
from tokamake.train.initial_checkpoint import check_begun
from tokamake.train.run_lock import locked

SAVING = ".saving"
"""Folder inside the output folder where a checkpoint grows until it is complete."""
_MAX_DIFFERENCES = 5
"""Differences between two runs that a message names."""
_WITHOUT_EFFECT = {
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


class ResumeState(NamedTuple):
    """Where a run stands at a checkpoint: the content of state.json."""

    digest: str
    """Digest of the run, see `run_digest`."""
    step: int
    """Finished steps."""
    consumed_samples: int
    """Samples trained on."""
    seconds: float
    """Time spent in training steps, over all jobs of the run."""
    world_size: int
    """Number of ranks."""

    def after_step(self, samples: int, seconds: float) -> "ResumeState":
        """The state after one more step."""
        return self._replace(
            step=self.step + 1,
            consumed_samples=self.consumed_samples + samples,
            seconds=self.seconds + seconds,
        )


class StartingPoint(NamedTuple):
    """Where a job begins to train."""

    state: ResumeState
    resumed: Path | None
    """Checkpoint of this run that it resumes from; None: the run has none yet."""
    unvalidated: bool = False
    """Whether a stop came between this checkpoint and the validation of its step."""


# ---- Which run a checkpoint belongs to ----


def run_digest(run: Run, *, index: dict[str, Any], weights: str) -> str:
    """Hash of all that decides a run's weights: settings, training samples, initial weights.

    Leaves out paths, the run's name and settings that change no weights.

    Args:
        run: the resolved run.
        index: content of the index folder's index.json.
        weights: hash of the initial weights.
    """
    split = index["splits"]["train"]
    samples = {
        "settings": {key: index[key] for key in ("version", "seed", *INDEX_SETTINGS)},
        "pairs": {file["prefix"]: index["pairs"][file["prefix"]] for file in split["files"]},
        "train": split,
    }
    return files.digest({**_effective_settings(run), "index": samples, "weights": weights})


def _effective_settings(run: Run) -> dict[str, Any]:
    """Settings that decide a run's weights."""
    return {
        "step": run.step,
        "seed": run.seed,
        "architecture": run.architecture.model_dump(mode="json"),
        "train": run.train.model_dump(mode="json", exclude=_WITHOUT_EFFECT),
    }


def differences(earlier: Path, run: Run) -> str:
    """Settings in which a run differs from the run of a checkpoint, for a message.

    Args:
        earlier: folder of the checkpoint, with the run.yaml of its run.
        run: the run to compare with it.
    """
    try:
        there = dict(_flat(_effective_settings(read_run(earlier / "run.yaml"))))
    except UserError:
        return "its settings are not known"
    here = dict(_flat(_effective_settings(run)))
    differing = [
        f"{name}: {there.get(name)} there, {here.get(name)} here"
        for name in {**there, **here}
        if there.get(name) != here.get(name)
    ]
    if not differing:
        return "its start or its data differ"
    hidden = len(differing) - _MAX_DIFFERENCES
    suffix = f", and {hidden} more" if hidden > 0 else ""
    return f"{', '.join(islice(differing, _MAX_DIFFERENCES))}{suffix}"


def _flat(settings: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested settings by dotted names."""
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", "empty" if value is None else value


def weights_digest(checkpoint: Path, note: Path | None = None) -> str:
    """Hash of the weights that a run starts from.

    For a checkpoint of a tokamake run, hash the run's digest and the step, and read no weights.
    For other checkpoints, hash all bytes.

    Args:
        checkpoint: its folder, or one whose `latest` names it.
        note: file that keeps the hash; bytes are read again only if sizes or times of files change.

    Raises:
        UserError: there is no checkpoint, or its state.json is damaged.
    """
    folder = locate(checkpoint)
    if state := read_state(folder):
        return files.digest({"run": state.digest, "step": state.step})
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


# ---- Where a job begins ----


@contextmanager
def claimed(run: Run, ranks: Ranks, index: dict[str, Any]) -> Iterator[StartingPoint]:
    """Lock a run's output folder and find where to begin; all ranks call this together.

    Args:
        run: the resolved run.
        ranks: this process among its peers.
        index: content of the index folder's index.json.

    Raises:
        UserError: another process trains there, or a checkpoint is missing or damaged.
    """
    with ExitStack() as lock:
        # Only rank 0 looks at the folder: other hosts may still see an older state of it.
        agreed: list[Any] = [None]
        with raise_on_all_ranks():
            if ranks.rank == 0:
                lock.enter_context(locked(run.output))
                agreed = [_starting_point(run, ranks, index)]
        dist.broadcast_object_list(agreed, src=0)
        yield agreed[0]


def _starting_point(run: Run, ranks: Ranks, index: dict[str, Any]) -> StartingPoint:
    note = run.output.with_name(f".{run.output.name}.start")
    digest = run_digest(run, index=index, weights=weights_digest(run.checkpoint, note))
    state = claim(
        run.output,
        digest,
        say=ranks.print_once,
        differences=lambda earlier: differences(earlier, run),
    )
    if state:
        resumed = run.output / f"global_step{state.step}"
        return StartingPoint(state, resumed, _lacks_validation(run, state.step, index))
    state = ResumeState(digest, run.step, run.consumed_samples, 0.0, ranks.world_size)
    return StartingPoint(state, None)


def _lacks_validation(run: Run, step: int, index: dict[str, Any]) -> bool:
    """Whether a validation is due at a step, but has no record there as earlier ones have."""
    train = run.train
    is_due = step % train.evaluation_interval == 0 or step == train.train_steps
    if not is_due or not train.evaluation_steps:
        return False
    records = metrics.read(run.output / metrics.FILE)
    current = metrics.validation(dict.fromkeys(index["splits"], 0.0)).keys()
    recorded = {name for record in records for name in record if name in current}
    here = {name for record in records for name in record if record["step"] == step}
    return not recorded <= here


def checkpoint_to_load(run: Run, ranks: Ranks, start: StartingPoint) -> Path | None:
    """Checkpoint to load with its optimizer states; None: the run takes weights alone.

    That is the run's own checkpoint, or one of another run that this run continues.

    Raises:
        UserError: the checkpoint of the other run is not the one that the run was resolved for.
    """
    if start.resumed:
        return start.resumed
    if run.train.finetune is not False:
        return None
    with raise_on_all_ranks():
        if ranks.rank == 0:
            check_begun(run)
    return run.checkpoint


def claim(
    output: Path,
    digest: str,
    say: Callable[[str], None],
    differences: Callable[[Path], str],
) -> ResumeState | None:
    """Prepare the output folder of a run; call it from one process only.

    A folder with a checkpoint of another run is renamed to <output>.<first 8 of its digest>.

    Args:
        output: output folder of the run.
        digest: digest of the run.
        say: prints a line for the user.
        differences: names the settings that differ from those of a checkpoint's run.

    Returns:
        State of the checkpoint to resume from; None: start from the beginning.

    Raises:
        UserError: `latest` names a missing checkpoint.
    """
    folder = Path(os.path.realpath(output))  # `output` may be a link to another disk, and stays one
    state = _state_of_latest(output)
    if state and state.digest == digest:
        shutil.rmtree(output / SAVING, ignore_errors=True)
        return state
    if state:
        reason = differences(latest(output))
        aside = _free_name(folder.with_name(f"{folder.name}.{state.digest[:8]}"))
        folder.rename(aside)
        say(f"{output}: holds another run's checkpoint ({reason}); moved to {aside}, starting at 0")
    output.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(exist_ok=True)
    shutil.rmtree(output / SAVING, ignore_errors=True)
    return None


# ---- Checkpoints in the output folder ----


def state_at(output: Path, step: int, digest: str) -> ResumeState:
    """Read the state of a run at a step.

    Raises:
        UserError: there is no checkpoint of this run at that step.
    """
    folder = output / f"global_step{step}"
    state = read_state(folder)
    if state is None or state.digest != digest:
        raise UserError(
            f"{folder}: missing, but the run is already past step {step}; set "
            "train.segment_steps so that segments end at later steps, or at those of checkpoints"
        )
    return state


def state_before(output: Path, state: ResumeState) -> ResumeState | None:
    """State of a run's newest checkpoint with all its files that is older than `state`, or None."""
    states = []
    for folder in output.glob("global_step*"):
        try:
            earlier = read_state(folder)
            # A folder that was replaced, global_step4.old, does not have the name of its step.
            if not earlier or folder.name != f"global_step{earlier.step}":
                continue
            if earlier.digest == state.digest and earlier.step < state.step:
                check_files(folder)
                states.append(earlier)
        except UserError:
            continue
    return max(states, key=lambda earlier: earlier.step, default=None)


def _state_of_latest(output: Path) -> ResumeState | None:
    if not (output / "latest").is_file():
        return None
    # Without a state.json, another program wrote the checkpoint.
    return read_state(latest(output)) or ResumeState("unknown", 0, 0, 0.0, 0)


def read_state(folder: Path) -> ResumeState | None:
    """Content of a checkpoint's state.json; None: there is no such file."""
    path = folder / "state.json"
    if not path.is_file():
        return None
    value = files.read_json(path, f"name another checkpoint in {folder.parent / 'latest'}")
    if not isinstance(value, dict) or value.keys() != {*ResumeState._fields}:
        raise UserError(f"{path}: damaged; name another checkpoint in {folder.parent / 'latest'}")
    return ResumeState(**value)


def _is_of_run(folder: Path, digest: str) -> bool:
    try:
        state = read_state(folder)
    except UserError:  # damaged
        return False
    return state is not None and state.digest == digest


def _free_name(path: Path) -> Path:
    """The path, or the first of PATH.2, PATH.3, … that does not exist."""
    names = (path.with_name(f"{path.name}.{number}") for number in count(2))
    return next(name for name in chain([path], names) if not name.exists())


def commit(output: Path, state: ResumeState) -> Path:
    """Move the checkpoint inside `SAVING` into place, then let `latest` name it.

    Call it from one process only, once the checkpoint's files are on disk. A folder of the same
    name exists if training restarted from an earlier checkpoint. One of this run is removed once
    the new one is in place; one of another run is renamed.

    Raises:
        UserError: a file of the checkpoint is missing or truncated.
    """
    name = f"global_step{state.step}"
    source, target = output / SAVING / name, output / name
    try:
        check_files(source)
    except UserError as error:
        raise UserError(
            f"{target}: not saved, because its files are not complete ({error}); `latest` still "
            "names the checkpoint before: run the same command again"
        ) from None
    files.write_json(source / "state.json", state._asdict())
    files.sync(source)
    if target.exists():
        replaced = _free_name(output / f"{name}.old")
        if _is_of_run(target, state.digest):
            replaced = output / SAVING / f"{name}.replaced"  # goes with `SAVING`, even after a kill
        target.rename(replaced)
    source.rename(target)
    files.sync(output)
    # `latest` comes last: a job that is killed before resumes from the checkpoint before.
    files.write_text(output / "latest_checkpointed_iteration.txt", f"{state.step}\n")
    files.write_text(output / "latest", name)
    shutil.rmtree(output / SAVING)
    return target
