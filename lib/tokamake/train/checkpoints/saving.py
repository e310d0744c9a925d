"""Checkpoints that are written while training continues."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tokamake.checkpoint.native.resume_state import ResumeState
from tokamake.runtime.rank_errors import raise_on_all_ranks
from tokamake.runtime.ranks import Ranks
from tokamake.train.checkpoints.commit import SAVING, commit
from tokamake.train.checkpoints.resume import ResumePoint
from tokamake.train.checkpoints.retention import Retention
from tokamake.train.hooks import Hook
from tokamake.train.sampler import Sampler
from tokamake.train.step_result import Saving
from tokamake.train.stopping.deadline import DURATIONS, Deadline, write_durations


class CheckpointSaver:
    """Saves a run's checkpoints, one at a time; all ranks call its methods together.

    Attributes:
        latest: last checkpoint that is complete, for messages.

    Args:
        hooks: learn of each checkpoint that is in place.
    """

    def __init__(
        self,
        sampler: Sampler,
        ranks: Ranks,
        *,
        engine: Any,
        deadline: Deadline,
        start: ResumePoint,
        hooks: Iterable[Hook] = (),
    ) -> None:
        self._run = run = sampler.run
        self._sampler, self._ranks, self._engine, self._deadline = sampler, ranks, engine, deadline
        self._hooks = hooks
        self.latest = str(start.resumed) if start.resumed else f"{run.start} (the start)"
        self._retention: Retention | None = None
        with raise_on_all_ranks():
            if ranks.rank == 0:
                verified = start.resumed is not None
                losses = sampler.validation_losses
                self._retention = Retention(run, start.state, losses=losses, verified=verified)
        self._saving: tuple[Saving, ResumeState, Callable[[Path], None]] | None = None

    @property
    def written(self) -> bool:
        """Whether this rank has written its files of the checkpoint that is being saved."""
        return self._saving is not None and self._saving[0].done

    def begin(self, state: ResumeState) -> None:
        """Begin to save a checkpoint, if it fits on the disk; call `finish` for the one before."""
        with raise_on_all_ranks():
            if self._retention:
                self._retention.make_room(state.step, self._engine.checkpoint_bytes())
        progress = {
            "iteration": state.step,
            "consumed_samples": state.consumed_samples,
            "consumed_tokens": state.consumed_samples * self._run.train.sequence_length,
            "run_digest": state.digest,
            **self._sampler.notes,
        }
        self._deadline.begin_saving()
        folder = self._run.output / SAVING / f"global_step{state.step}"
        self._saving = self._engine.save(folder, progress), state, self._sampler.recorder()

    def finish(self) -> None:
        """Wait until all ranks have written the checkpoint, then put it in place."""
        if self._saving is None:
            return
        (saving, state, record), self._saving = self._saving, None
        saving.wait()
        with raise_on_all_ranks():
            if self._ranks.rank == 0:
                output, num_ranks = self._run.output, self._ranks.world_size
                record(output / SAVING / f"global_step{state.step}")
                commit(output, state)
                self._deadline.end_saving()
                write_durations(output / DURATIONS, num_ranks, measured=self._deadline.measured)
                if self._retention:
                    self._retention.note_commit(state.step)
        self.latest = str(self._run.output / f"global_step{state.step}")
        self._ranks.print_once(f"saved {self.latest}")
        for hook in self._hooks:
            hook.saved(state)

    def note_validation(self) -> None:
        """Let `train.keep_best` decide again, since a validation loss was recorded."""
        if self._retention and self._saving is None and self._run.train.keep_best:
            self._retention.note_commit(self._retention.current)

    def close(self) -> None:
        """Wait until old checkpoints are deleted."""
        if self._retention:
            self._retention.close()
