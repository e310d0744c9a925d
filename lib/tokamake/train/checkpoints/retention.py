"""Delete old checkpoints of a run, and make room for the next one; rank 0 alone does it.

A checkpoint is renamed into the folder `DELETING` before its files are removed: after a kill, the
next job removes the rest. Deletions run in a thread beside training.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from tokamake import files
from tokamake.checkpoint.detect import check_checksums, open_any
from tokamake.checkpoint.native.folder import check_files
from tokamake.checkpoint.native.resume_state import ResumeState, read_state
from tokamake.config.resolved_run import Run
from tokamake.config_files import read_yaml
from tokamake.errors import TemporaryError, UserError, of_system
from tokamake.train.checkpoints.summary import summary_path
from tokamake.units import in_bytes

DELETING = ".deleting"
"""Folder inside the output folder with checkpoints that are being deleted."""
_MARGIN = 1.01
"""Room that a checkpoint needs, as a multiple of the size of the one before."""
_WAIT_SECONDS = 20
"""Parallel file systems free the space of deleted files a little later."""
_WORKERS = 4
"""Threads that read a checkpoint to verify it."""


class Retention:
    """Keeps the checkpoints of a run that `train.keep_last` and its companions ask for.

    These are kept as well: ends of segments, checkpoints that other runs in the same results folder
    start from, checkpoints of other runs, and checkpoints later than the current step.

    Attributes:
        current: step of the newest checkpoint.

    Args:
        losses: returns steps that were validated, and a number that is lower for better weights.
        verified: whether the checkpoint at `state` was loaded, which has compared its checksums.
    """

    def __init__(
        self,
        run: Run,
        state: ResumeState,
        *,
        losses: Callable[[], Iterable[tuple[int, float]]],
        verified: bool = False,
    ) -> None:
        self._run, self._start, self.current, self._losses = run, state, state.step, losses
        # Training went back before these steps: they are no checkpoints of the current weights.
        self._abandoned = {step for step in self._steps() if step > state.step}
        self._verified = state.step if verified else None
        # Reading metadata and YAML takes time from the steps of this process: do it once.
        self._whole = set[int]()
        self._starts: dict[tuple[Path, int], str] = {}
        self._thread = ThreadPoolExecutor(1)
        self._deletion: Future[None] = self._thread.submit(self._remove_leftovers)

    # ---- What the saver calls ----

    def make_room(self, step: int, estimate: float) -> None:
        """Check that the next checkpoint fits on the disk; delete earlier ones if this helps.

        The newest checkpoint stays. Older ones are deleted only if all its checksums are right.

        Args:
            estimate: its size in bytes, if the run has none yet.

        Raises:
            TemporaryError: there is not enough room.
        """
        self.wait()
        newest = self._folder(self.current)
        needed = _MARGIN * (_size(newest) or estimate)
        problem = f"{newest} is complete" if newest.is_dir() else "the run has no checkpoint yet"
        if self._free() < needed and self._run.train.keep_last:
            try:
                self._delete_until(needed)
            except UserError as error:
                problem = f"older checkpoints stay, because the newest is damaged ({error})"
        if (free := self._free()) < needed:
            raise TemporaryError(
                f"{self._run.output}: step {step} is not saved: a checkpoint takes about "
                f"{in_bytes(round(needed))}, the file system has {in_bytes(free)} left; free some, "
                f"or keep fewer checkpoints (train.keep_last), and rerun; {problem}"
            )

    def note_commit(self, step: int) -> None:
        """Begin to delete old checkpoints, since a new one is complete and in its place."""
        self.wait()
        self.current = step
        self._abandoned.discard(step)
        if self._run.train.keep_last:
            self._deletion = self._thread.submit(self._delete_old, self._run.train.keep_last)

    def wait(self) -> None:
        """Wait until the deletion has ended; training continues if it has failed."""
        try:
            self._deletion.result()
        except OSError as error:
            print(f"old checkpoints are not deleted: {of_system(error)}", flush=True)
            self._deletion = Future()
            self._deletion.set_result(None)

    def close(self) -> None:
        """Wait until nothing is being deleted any more."""
        self.wait()
        self._thread.shutdown()

    # ---- Deleting ----

    def _remove_leftovers(self) -> None:
        shutil.rmtree(self._run.output / DELETING, ignore_errors=True)

    def _delete_old(self, keep_last: int) -> None:
        """Delete all checkpoints that no setting keeps."""
        self._delete(self._deletable(keep_last))
        self._delete_replaced()
        newest = self._folder(self.current)
        if self._free() < _MARGIN * _size(newest):
            # `make_room` will have to delete more: verify beside training, not while all wait.
            with suppress(UserError):
                self._verify_newest()

    def _delete_replaced(self) -> None:
        """Delete checkpoints of this run that were renamed, such as global_step4.old.

        `commit` renames one from before a change of the run if a new one takes its place.
        """
        digests = {self._start.digest, *(change.digest for change in self._start.lineage)}
        for folder in sorted(self._run.output.glob("global_step*.old*")):
            with suppress(UserError):
                state = read_state(folder)
                if state and state.digest in digests and not folder.is_symlink():
                    self._delete_folders([folder])

    def _delete_until(self, needed: float) -> None:
        """Delete checkpoints but the newest, oldest first, until there is room."""
        for step in self._deletable(1):
            self._verify_newest()
            self._delete([step])
            end = time.monotonic() + _WAIT_SECONDS
            while self._free() < needed and time.monotonic() < end:
                time.sleep(0.5)
            if self._free() >= needed:
                return

    def _verify_newest(self) -> None:
        """Compare all bytes of the newest checkpoint with their checksums, once."""
        if self._verified != self.current:
            newest = self._folder(self.current)
            check_files(newest)
            check_checksums(open_any(newest), workers=_WORKERS)
            self._verified = self.current

    def _delete(self, steps: list[int]) -> None:
        self._delete_folders([self._folder(step) for step in steps])

    def _delete_folders(self, folders: list[Path]) -> None:
        deleting = self._run.output / DELETING
        for folder in folders:
            deleting.mkdir(exist_ok=True)
            target = deleting / folder.name
            folder.rename(target)
            files.sync(self._run.output)  # a crash of the machine must not leave half a checkpoint
            shutil.rmtree(target)
        if folders:
            deleting.rmdir()
            print(f"deleted {', '.join(map(str, folders))}", flush=True)

    # ---- What to keep ----

    def _deletable(self, keep_last: int) -> list[int]:
        """Steps of checkpoints that may be deleted, in order; none if the newest is not whole."""
        self._whole.discard(self.current)
        steps = [step for step in self._steps() if step <= self.current]
        whole = [step for step in steps if self._is_whole(step)]
        if self.current not in whole:
            return []
        last = [step for step in whole if step not in self._abandoned][-keep_last:]
        kept = {*last, self.current, *self._best(whole), *self._starts_of_others()}
        return [step for step in steps if step not in kept and not self._is_kept_for_ever(step)]

    def _steps(self) -> list[int]:
        """Steps of the checkpoints of this run in the output folder, in order."""
        steps = []
        for folder in self._run.output.glob("global_step*"):
            with suppress(UserError):  # of a damaged state.json
                state = read_state(folder)
                is_ours = state and (
                    state.digest == self._start.digest or state.is_before(self._start)
                )
                # A link is a checkpoint that the user has moved to another disk.
                if state and is_ours and not folder.is_symlink():
                    steps += [state.step] * (folder == self._folder(state.step))
        return sorted(steps)

    def _is_whole(self, step: int) -> bool:
        if step not in self._whole:
            try:
                check_files(self._folder(step))
            except UserError:
                return False
            self._whole.add(step)
        return True

    def _is_kept_for_ever(self, step: int) -> bool:
        """Whether `keep_every` keeps a step, or a segment of the workflow ends there."""
        every = self._run.train.keep_every
        return bool(every and step % every == 0) or summary_path(self._run, step).exists()

    def _best(self, steps: Iterable[int]) -> list[int]:
        """The steps with the lowest validation loss, as many as `keep_best`."""
        if not (number := self._run.train.keep_best):
            return []
        losses = dict(self._losses())
        measured = [step for step in steps if step in losses]
        best = sorted(measured, key=lambda step: (losses[step], step))
        return best[:number]

    def _starts_of_others(self) -> Iterator[int]:
        """Steps of checkpoints that other runs in the same results folder start from."""
        folders = {os.path.realpath(self._folder(step)): step for step in self._steps()}
        for path in self._run.output.parent.parent.glob("*/run.yaml"):
            with suppress(UserError, FileNotFoundError):
                key = path, path.stat().st_mtime_ns
                if key not in self._starts:
                    other = read_yaml(path, "")
                    self._starts[key] = (
                        str(other.get("checkpoint")) if isinstance(other, dict) else ""
                    )
                step = folders.get(os.path.realpath(self._starts[key]))
                if step is not None:
                    yield step

    # ---- Sizes and places ----

    def _folder(self, step: int) -> Path:
        return self._run.output / f"global_step{step}"

    def _free(self) -> int:
        return shutil.disk_usage(self._run.output).free


def _size(folder: Path) -> int:
    """Bytes of the files in a folder; 0 if there is none."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
