"""Which checkpoint a run continues from, and how a new one takes its place, whole or not at all.

The output folder holds global_step<N>/ folders and `latest`, which names one of them.
Each folder has a state.json that says which run made it. `loop` asks here before it starts;
`engine` fills the folder that `commit` puts in place.
"""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, NamedTuple

from tokamake import files
from tokamake.checkpoint.latest import REMEDY, latest
from tokamake.checkpoint.native.folder import locate
from tokamake.config.resolved_run import Run, read_run
from tokamake.config.training import INDEX_SETTINGS
from tokamake.errors import UserError

SAVING = ".saving"
"""Folder inside the output folder where a checkpoint grows until it is whole."""
_SHOWN = 5
"""Differences between two runs that are told."""
_WITHOUT_EFFECT = {
    "log_interval",
    "save_interval",
    "segment_steps",
    "evaluation_interval",
    "evaluation_steps",
    "split",  # the index's digest tells what came of it
    # How ranks share the work, which changes no more than the order of sums.
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


class ResumeState(NamedTuple):
    """What state.json holds: where a run stands at a checkpoint."""

    digest: str
    """Of the run, see `run_digest`."""
    step: int
    """Finished steps."""
    consumed_samples: int
    """Samples trained on."""
    seconds: float
    """Time spent in training steps, restarts included."""
    world_size: int
    """Ranks that trained."""


def run_digest(run: Run, *, index: dict[str, Any], weights: str) -> str:
    """Hash of all that decides a run's weights: settings, training samples, initial weights.

    Paths, the run's name and settings that only watch the run are left out.

    Args:
        run: the resolved run.
        index: content of the index folder's index.json.
        weights: hash of the initial weights.
    """
    trained = index["splits"]["train"]
    samples = {
        "settings": {key: index[key] for key in ("version", "seed", *INDEX_SETTINGS)},
        "pairs": {file["prefix"]: index["pairs"][file["prefix"]] for file in trained["files"]},
        "train": trained,
    }
    return files.digest(
        {
            **_deciding(run),
            "index": samples,
            "weights": weights,
        }
    )


def _deciding(run: Run) -> dict[str, Any]:
    """Settings that decide a run's weights."""
    return {
        "step": run.step,
        "seed": run.seed,
        "architecture": run.architecture.model_dump(mode="json"),
        "train": run.train.model_dump(mode="json", exclude=_WITHOUT_EFFECT),
    }


def differences(earlier: Path, run: Run) -> str:
    """What tells a run from that which made a checkpoint, for people.

    Args:
        earlier: folder of the checkpoint, whose run.yaml says its settings.
        run: another run.
    """
    try:
        there = dict(_flat(_deciding(read_run(earlier / "run.yaml"))))
    except UserError:
        return "its settings are not known"
    here = dict(_flat(_deciding(run)))
    found = [
        f"{name}: {there.get(name)} there, {here.get(name)} here"
        for name in {**there, **here}
        if there.get(name) != here.get(name)
    ]
    more = f", and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return f"{', '.join(islice(found, _SHOWN))}{more}" if found else "its start or its data differ"


def _flat(settings: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", "empty" if value is None else value


def weights_digest(checkpoint: Path, note: Path | None = None) -> str:
    """Hash that tells what a run starts from.

    Of a checkpoint of one of our runs it is that of the run's digest and the step, so that no
    weights are read; of others that of all bytes.

    Args:
        checkpoint: its folder, or one whose `latest` names it.
        note: file to keep the hash in, so that bytes are read again only if files look changed.

    Raises:
        UserError: there is no checkpoint, or its state.json is damaged.
    """
    folder = locate(checkpoint)
    if state := _read_state(folder):
        return files.digest({"run": state.digest, "step": state.step})
    paths = sorted(folder.glob("*.distcp"))
    if not paths:
        raise UserError(f"{checkpoint}: holds no weights in tokamake's own format; {REMEDY}")
    seen = [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in paths]
    known = files.read_json(note, "remove it") if note and note.is_file() else {}
    if known.get("files") == seen:
        return str(known["digest"])
    found = files.digest([files.sha256(path) for path in paths])
    if note:
        files.write_json(note, {"files": seen, "digest": found})
    return found


@contextmanager
def locked(output: Path) -> Iterator[None]:
    """Keep other trainings out of an output folder: ranks can outlive a launcher that was killed.

    The lock ends with the process that holds it, however it ends.

    Raises:
        UserError: another process has the folder.
    """
    path = output.with_name(f".{output.name}.lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{output}: another process trains there; end it (pid {path.read_text().strip()})"
            ) from None
        except OSError:
            pass  # Some parallel file systems are mounted without locks.
        stream.truncate(0)
        stream.write(f"{os.getpid()} on {os.uname().nodename}")
        stream.flush()
        yield


def claim(
    output: Path,
    digest: str,
    say: Callable[[str], None],
    differences: Callable[[Path], str],
) -> ResumeState | None:
    """Ready the output folder for a run and tell where to continue; None: at the beginning.

    A folder with another run's checkpoint is renamed to <output>.<first 8 of its digest>.
    Only one process may call this.

    Args:
        output: output folder of the run.
        digest: of the run.
        say: prints a line for the user.
        differences: tells what is different in the run that made a checkpoint.

    Raises:
        UserError: `latest` names a missing checkpoint.
    """
    state = _state_of_latest(output)
    if state and state.digest == digest:
        shutil.rmtree(output / SAVING, ignore_errors=True)
        return state
    if state:
        why = differences(latest(output))
        aside = _free_name(output.with_name(f"{output.name}.{state.digest[:8]}"))
        output.rename(aside)
        say(f"{output}: holds another run's checkpoint ({why}); moved to {aside}, starting anew")
    output.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(output / SAVING, ignore_errors=True)
    return None


def state_at(output: Path, step: int, digest: str) -> ResumeState:
    """What a run had come to at a step.

    Raises:
        UserError: there is no checkpoint of this run at that step.
    """
    folder = output / f"global_step{step}"
    state = _read_state(folder)
    if state is None or state.digest != digest:
        raise UserError(
            f"{folder}: not there, but the run is past step {step} already; set "
            "train.segment_steps so that segments end at later steps, or at those of checkpoints"
        )
    return state


def _state_of_latest(output: Path) -> ResumeState | None:
    if not (output / "latest").is_file():
        return None
    return _read_state(latest(output)) or ResumeState("unknown", 0, 0, 0.0, 0)


def _read_state(folder: Path) -> ResumeState | None:
    """What a checkpoint's state.json says; None: it has none."""
    path = folder / "state.json"
    if not path.is_file():
        return None
    value = files.read_json(path, f"name another checkpoint in {folder.parent / 'latest'}")
    if not isinstance(value, dict) or value.keys() != {*ResumeState._fields}:
        raise UserError(f"{path}: damaged; name another checkpoint in {folder.parent / 'latest'}")
    return ResumeState(**value)


def _free_name(path: Path) -> Path:
    names = (path.with_name(f"{path.name}.{number}") for number in count(2))
    return next(free for free in chain([path], names) if not free.exists())


def commit(output: Path, state: ResumeState) -> Path:
    """Put the checkpoint that has grown in `SAVING` in place, then point to it; one process only.

    Its files are on disk already. A folder of the same name, which a restart at an earlier
    checkpoint can meet, is renamed, not removed.
    """
    name = f"global_step{state.step}"
    grown, final = output / SAVING / name, output / name
    files.write_json(grown / "state.json", state._asdict())
    files.sync(grown)
    if final.exists():
        final.rename(_free_name(output / f"{name}.old"))
    grown.rename(final)
    files.sync(output)
    files.write_text(output / "latest_checkpointed_iteration.txt", f"{state.step}\n")
    files.write_text(output / "latest", name)
    shutil.rmtree(output / SAVING)
    return final
