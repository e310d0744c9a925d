"""Where a run begins or resumes.

The output folder holds global_step<N>/ folders and a file `latest` that names one of them. Each
folder has a state.json that names the run by its digest.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from tokamake import files
from tokamake.checkpoint.native.folder import check_files
from tokamake.checkpoint.native.resume_state import (
    ResumeState,
    newest_state,
    ranges_without_effect,
    read_state,
    run_since_change,
)
from tokamake.config.resolved_run import Run
from tokamake.errors import UserError
from tokamake.preflight import changes
from tokamake.preflight.initial_checkpoint import check_begun
from tokamake.preflight.run_record import (
    RunRecord,
    read_record,
    record,
    run_digest,
    write_record,
)
from tokamake.runtime.folder_lock import locked
from tokamake.runtime.rank_errors import raise_on_all_ranks
from tokamake.runtime.ranks import Ranks
from tokamake.train import metrics
from tokamake.train.checkpoints.commit import SAVING, free_name
from tokamake.train.checkpoints.first_weights import weights_digest


class ResumePoint(NamedTuple):
    """Where a job begins to train."""

    state: ResumeState
    resumed: Path | None
    """Checkpoint of this run that it resumes from; None: the run has none yet."""
    unvalidated: bool = False
    """Whether a stop came between this checkpoint and the validation of its step."""
    continued: Path | None = None
    """Checkpoint of another run whose training, with its optimizer states, this run continues."""


# ---- Where a job begins ----


@contextmanager
def locked_output(
    run: Run,
    ranks: Ranks,
    *,
    find_start: Callable[[str], ResumePoint],
    beat: Callable[[], object] = lambda: None,
) -> Iterator[ResumePoint]:
    """Lock a run's output folder and find where to begin; all ranks call this together.

    Args:
        find_start: takes the digest of the first weights; only rank 0 calls it.

    Raises:
        UserError: another process trains there, or a checkpoint is missing or damaged.
    """
    with ExitStack() as lock:
        with raise_on_all_ranks():
            if ranks.rank == 0:
                lock.enter_context(locked(run.output))
        note = run.output.with_name(f".{run.output.name}.start")
        weights = weights_digest(run.checkpoint, ranks, note=note, beat=beat)
        # Only rank 0 looks at the folder: other hosts may still see an older state of it.
        agreed: list[Any] = [None]
        with raise_on_all_ranks():
            if ranks.rank == 0:
                agreed = [find_start(weights)]
        dist.broadcast_object_list(agreed, src=0)
        yield agreed[0]


def resume_point(weights: str, run: Run, *, ranks: Ranks, index: dict[str, Any]) -> ResumePoint:
    """Prepare the output folder of a run with these first weights, and find where it begins."""
    digest = run_digest(run, index=index, weights=weights)

    @cache
    def current() -> RunRecord:  # reads the manifest of each dataset
        return record(run, index=index, weights=weights)

    def decide(state: ResumeState) -> tuple[str, tuple[str, ...] | None]:
        """Message for the user, and the changes with which the run continues; None: restart."""
        changed = changes.compare_resolved(run, state, current=current())
        on_change = run.train.on_change
        text = changes.decision(on_change, changed, state=state, output=run.output)
        return text, changed.lines if on_change == "continue" else None

    state = prepare_output(run.output, digest, say=ranks.print_once, decide=decide)
    if read_record(run.output, digest) is None:
        write_record(run.output, digest, content=current())
    if state:
        resumed = run.output / f"global_step{state.step}"
        is_unvalidated = _lacks_validation(run_since_change(run, state), state.step, index=index)
        return ResumePoint(state, resumed, is_unvalidated)
    if before := ranges_without_effect(run.train.skip_data, run.step):
        ranks.print_once(f"train.skip_data: {before}")
    state = ResumeState(digest, run.step, run.consumed_samples, 0.0, ranks.world_size)
    if run.train.finetune is not False:
        return ResumePoint(state, None)
    check_begun(run)
    return ResumePoint(state, None, continued=run.checkpoint if run.train.load_optimizer else None)


def _lacks_validation(run: Run, step: int, *, index: dict[str, Any]) -> bool:
    """Whether a validation is due at a step without a record, while earlier ones have one."""
    train = run.train
    is_due = step % train.evaluation_interval == 0 or step == train.train_steps
    if not is_due or not train.evaluation_steps:
        return False
    records = metrics.read(run.output / metrics.FILE)
    current = metrics.validation(dict.fromkeys(index["splits"], metrics.Validation(0.0))).keys()
    recorded = {name for record in records for name in record if name in current}
    here = {name for record in records for name in record if record["step"] == step}
    return not recorded <= here


def prepare_output(
    output: Path,
    digest: str,
    *,
    say: Callable[[str], None],
    decide: Callable[[ResumeState], tuple[str, tuple[str, ...] | None]],
) -> ResumeState | None:
    """Prepare the output folder of a run; call it from one process only.

    Args:
        decide: takes the state of the newest checkpoint if its digest is another one. Returns a
            line for the user, and the changes with which the run continues. None: the folder is
            renamed to <output>.<first 8 of its digest>, and the run starts from the beginning.

    Returns:
        State of the checkpoint to resume from; None: start from the beginning.

    Raises:
        UserError: `latest` names a missing checkpoint, or `decide` refuses the run.
    """
    folder = Path(os.path.realpath(output))  # `output` may be a link to another disk, and stays one
    state, problem = newest_state(output)
    if problem:
        say(problem)
    if state and state.digest != digest:
        text, changed = decide(state)
        if changed is not None:
            say(f"{output}: {text}")
            state = state.changed(digest, changed)
        else:
            aside = free_name(folder.with_name(f"{folder.name}.{state.digest[:8]}"))
            folder.rename(aside)
            say(f"{output}: {text}; moved to {aside}")
            state = None
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(output / SAVING, ignore_errors=True)
    if problem and state:  # other commands follow `latest`, too
        files.write_text(output / "latest", f"global_step{state.step}")
    return state


# ---- Checkpoints in the output folder ----


def state_at(output: Path, step: int, *, state: ResumeState) -> ResumeState:
    """Read the state of a run at a step."""
    folder = output / f"global_step{step}"
    earlier = read_state(folder)
    if earlier is None or not earlier.is_before(state):
        raise UserError(
            f"{folder}: missing, but the run is already past step {step}; set "
            "train.segment_steps so that segments end at later steps, or at steps with a checkpoint"
        )
    return earlier


def state_before(output: Path, state: ResumeState) -> ResumeState | None:
    """State of a run's newest checkpoint with all its files that is older than `state`, or None."""
    states = []
    for folder in output.glob("global_step*"):
        try:
            earlier = read_state(folder, thorough=True)
            # A folder that was replaced, global_step4.old, does not have the name of its step.
            if not earlier or folder.name != f"global_step{earlier.step}":
                continue
            if earlier.is_before(state) and earlier.step < state.step:
                check_files(folder)
                states.append(earlier)
        except UserError:
            continue
    newest = max(states, key=lambda earlier: earlier.step, default=None)
    return newest and newest.in_place_of(state)


def load_newest_whole(
    load: Callable[[Path], None], run: Run, *, ranks: Ranks, start: ResumePoint
) -> ResumePoint:
    """Load the checkpoint that a run resumes from, or the newest one before it that is whole.

    All ranks call this together, and load the same checkpoint.

    Args:
        load: loads a checkpoint and verifies it; each call replaces all loaded state.
    """
    newest_problem = ""
    while start.resumed:
        try:
            with raise_on_all_ranks():
                if ranks.rank == 0:  # a damaged file must not come into the model
                    check_files(start.resumed)
            with raise_on_all_ranks():
                load(start.resumed)
        except UserError as error:
            newest_problem = newest_problem or str(error)
            problem = error
        else:
            return start
        if (before := newest_before(start.state, run, ranks=ranks)) is None:
            break
        start = before
        reason = str(problem).rpartition("; ")[0] or str(problem)  # no remedy is needed
        ranks.print_once(f"{reason}: going back to {start.resumed}")
    raise UserError(
        f"{newest_problem}; {run.output} has no whole checkpoint before it: restore one, or move "
        "the folder away to start at step 0"
    )


def newest_before(state: ResumeState, run: Run, *, ranks: Ranks) -> ResumePoint | None:
    """Newest checkpoint of a run with all its files before a state; None: there is none.

    All ranks call this together.
    """
    agreed: list[ResumeState | None] = [None]
    with raise_on_all_ranks():
        if ranks.rank == 0:
            agreed = [state_before(run.output, state)]
    dist.broadcast_object_list(agreed, src=0)
    before = agreed[0]
    return before and ResumePoint(before, run.output / f"global_step{before.step}")
