"""The training loop, of pretraining and finetuning: from a checked run to its last checkpoint.

A sampler provides the samples of steps and the validations. All ranks run this code together, and
each of its decisions is the same on all ranks.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import Any, NamedTuple

import torch

from tokamake import plugins
from tokamake.checkpoint.native.resume_state import ResumeState, run_since_change
from tokamake.config.resolved_run import Run
from tokamake.data.samples.steps import StepBatch
from tokamake.errors import UserError
from tokamake.runtime.cores import prefetched
from tokamake.runtime.exit_status import Stopped
from tokamake.runtime.rank_errors import report_from_any_rank
from tokamake.runtime.ranks import Ranks
from tokamake.schedules._schedule import Schedule
from tokamake.train.checkpoints.resume import ResumePoint, load_newest_whole, newest_before
from tokamake.train.checkpoints.saving import CheckpointSaver
from tokamake.train.hooks import FinishedStep, Hook, Training, open_hooks
from tokamake.train.hooks.heartbeat import Heartbeat
from tokamake.train.hooks.job_progress import retracted_on_error, say_stopped
from tokamake.train.sampler import Sampler
from tokamake.train.stability.step_guard import StepGuard
from tokamake.train.step_result import NO_RESULT, StepResult
from tokamake.train.stopping.deadline import Deadline
from tokamake.train.stopping.stopping import Stopping, on_signals


class Job(NamedTuple):
    """Surroundings of a run on this rank."""

    ranks: Ranks
    device: torch.device
    deadline: Deadline
    """End of this job."""
    heartbeat: Heartbeat
    """Watch over the ranks."""


class Trainer:
    """One rank's part of a run; all ranks call its methods together.

    Attributes:
        run: the run with the remaining steps after its last change.
        state: finished steps, consumed samples and training time.
        last_step: step to end at.
        stopped: why the run was asked to stop, if it was.
    """

    state: ResumeState

    def __init__(
        self,
        run: Run,
        job: Job,
        *,
        sampler: Sampler,
        start: ResumePoint,
        until_step: int | None = None,
    ) -> None:
        self._resolved, self._until_step, self.sampler = run, until_step, sampler
        self.ranks, self.device, self.deadline, self.heartbeat = job
        self.stopping = Stopping(run.output, job.ranks, deadline=job.deadline)
        self.stopped: Stopped | None = None

        # ---- Model and optimizer ----
        # Imported late: DeepSpeed takes seconds, and a finished run does not need it.
        backend = plugins.load("train/backends", run.train.backend)
        self.heartbeat.beat("builds the model")
        self.engine: Any = backend.Engine(
            run, self.ranks, device=self.device, continues=bool(start.resumed or start.continued)
        )
        self.heartbeat.set_group_timeouts()
        if start.resumed:
            start = load_newest_whole(self.engine.load, run, ranks=self.ranks, start=start)
        elif start.continued:
            self.engine.load(start.continued)
            self.engine.check_finite(start.continued)
        self._begin_at(start)

    def _begin_at(self, start: ResumePoint) -> None:
        """Prepare to continue from the checkpoint that is loaded, or from the start of the run."""
        run, ranks, sampler, self.state = self._resolved, self.ranks, self.sampler, start.state
        sampler.begin(start.resumed)
        if start.resumed:
            ranks.print_once(f"{run.output}: continuing at step {self.state.step}")
        # The checkpoint that was loaded decides how many steps a changed run has.
        self.run = run_since_change(run, self.state)
        self.last_step = self._until_step or self.run.train.train_steps
        self.schedule = Schedule(self.run.train)

        # ---- Hooks, checkpoints and journal ----
        training = Training(
            self.run,
            self.state,
            ranks,
            self.device,
            hosts=self.heartbeat.hosts,
            corpora=sampler.corpora,
            heartbeat=self.heartbeat,
            engine=self.engine,
        )
        self.hooks: list[Hook] = open_hooks(training, sampler.hooks())
        self.saver = CheckpointSaver(
            sampler,
            ranks,
            engine=self.engine,
            deadline=self.deadline,
            start=start,
            hooks=self.hooks,
        )
        self.guard = StepGuard(
            self.run, ranks, engine=self.engine, samples=sampler.documents, start=self.state
        )
        # The next step is read while the device computes.
        steps = sampler.steps(self.state, self.engine.mesh, left_out=self.guard.left_out)
        self.steps = report_from_any_rank(prefetched(steps), ranks)

    # ---- The loop ----

    def train(self) -> ResumeState:
        """Train until `last_step`, a stop signal or the end of the job; save the last step."""
        with (
            closing(self),
            retracted_on_error(self.ranks),
            on_signals(self.stopping.signals.note),
        ):
            if self.sampler.needs_validation(self.state):
                self.validate()
            while self.state.step < self.last_step:
                result = self.step()
                if result is not None:  # not back at a checkpoint
                    self._save_and_validate(stop=result.stop)
                    if result.stop:
                        break
            self.saver.finish()
            if self.stopped and self.state.step < self.last_step:
                say_stopped(self.stopped, self.state.step, ranks=self.ranks)
            else:
                self._sync()  # for a validation after the save
        return self.state

    def _save_and_validate(self, *, stop: bool) -> None:
        """Save and validate after a step if they are due; `stop`: the job ends after this step."""
        is_validated = self._due(self.run.train.evaluation_interval)
        is_saved = stop or self.state.step == self.last_step
        is_saved |= is_validated and self.sampler.saves_validated
        if is_saved or self._due(self.run.train.save_interval):
            self.heartbeat.beat("saves")
            self.saver.finish()
            # A checkpoint on disk must not be newer than the records on disk.
            self._sync()
            self.saver.begin(self.state)
            # A kill in the validation must not cost the steps before it.
            if stop or is_validated:
                self.saver.finish()
        if stop:
            self.stopped = self.stopping.agree()
        # A person made the file `stop`, and can wait for a validation.
        if is_validated or self.stopped is Stopped.FILE:
            self.validate()

    def _due(self, interval: int) -> bool:
        return self.state.step % interval == 0 or self.state.step == self.run.train.train_steps

    # ---- A step: the guard decides its update, and what follows ----

    def step(self) -> StepResult | None:
        """Train on one global batch, or leave it out; return None if the loop has gone back.

        Raises:
            UserError: training has diverged, or samples cannot be read.
        """
        begin, reading, seconds = time.perf_counter(), 0.0, 0.0
        learning_rate, result = self.learning_rate(), NO_RESULT
        for hook in self.hooks:
            hook.begin_step(self.state.step + 1)
        self.heartbeat.beat("reads samples")
        batch = next(self.steps)
        if batch.micro_batches:
            self._verify(batch)
            self.heartbeat.beat("trains")
            reading = time.perf_counter() - begin
            result = self.engine.train_step(
                batch.micro_batches,
                learning_rate=learning_rate,
                weight_decay=self.schedule.weight_decay(*self._progress),
                find_fault=self.guard.find_fault,
                stop=self.stopping.is_asked(),
                saved=self.saver.written,
                samples=self.sampler.sample_ids(batch),
            )
            seconds = time.perf_counter() - begin
            if not self._respond(result, batch):
                return None
        num_samples = batch.global_batch_size
        self.state = self.state.after_step(num_samples, seconds, updated=result.updated)
        is_logged = self._due(self.run.train.log_interval) or self.state.step == 1 or result.stop
        finished = FinishedStep(
            self.state,
            result,
            learning_rate,
            self.learning_rate(),
            num_samples,
            seconds,
            reading,
            is_logged,
        )
        for hook in self.hooks:
            hook.end_step(finished)
        return result

    def _verify(self, batch: StepBatch) -> None:
        """Look for faulty hardware if `train.verify_interval` says so."""
        step, interval = self.state.step + 1, self.run.train.verify_interval
        if not interval or step % interval:
            return
        self.heartbeat.beat("computes a micro batch twice")
        self.engine.check_repeats(
            batch.micro_batches,
            samples=self.sampler.sample_ids(batch),
            hosts=self.heartbeat.hosts,
            step=step,
        )

    def learning_rate(self) -> float:
        """Learning rate of the next step; bad steps lower it."""
        return self.schedule.learning_rate(*self._progress) * self.guard.state.rate_factor

    @property
    def _progress(self) -> tuple[int, int]:
        return self.state.step, self.state.consumed_samples

    def _respond(self, result: StepResult, batch: StepBatch) -> bool:
        """Apply `train.on_bad_step`; put a checkpoint in place if all ranks wrote it.

        Return False if the loop has gone back to a checkpoint.
        """
        if result.bad and (checkpoint := self._checkpoint_before(result, batch)):
            self._go_back(checkpoint)
            return False
        self.guard.note(self.state.step + 1, result)
        self.state = self.state._replace(guard=self.guard.state)
        if result.saved:
            self.saver.finish()
        return True

    def _checkpoint_before(self, result: StepResult, batch: StepBatch) -> ResumePoint | None:
        try:
            return self.guard.respond(
                self.state.step + 1, result, batch=batch, newest=self._newest_checkpoint
            )
        except UserError as error:
            self.saver.finish()
            raise UserError(f"{error}; last good checkpoint: {self.saver.latest}") from None

    def _newest_checkpoint(self) -> ResumePoint | None:
        self.saver.finish()
        here = self.state._replace(step=self.state.step + 1)  # the last finished step counts
        return newest_before(here, self._resolved, ranks=self.ranks)

    def _go_back(self, start: ResumePoint) -> None:
        self.heartbeat.prepare("goes back to a checkpoint")
        self.close()
        self._begin_at(
            load_newest_whole(self.engine.load, self._resolved, ranks=self.ranks, start=start)
        )

    # ---- Validation and end ----

    def validate(self) -> None:
        """Measure each validation split."""
        measured = self.sampler.validate(self.engine, self.state, watch=self._watch)
        if measured:
            for hook in self.hooks:
                hook.validated(self.state, measured)
            self.saver.note_validation()

    def _watch(self, micro_batches: Iterable[Any]) -> Iterator[Any]:
        beating = self.heartbeat.counted(micro_batches, "validates")
        return report_from_any_rank(beating, self.ranks)

    def _sync(self) -> None:
        for hook in self.hooks:
            hook.sync()

    def close(self) -> None:
        """Close the hooks and the journal; wait until old checkpoints are deleted."""
        for hook in self.hooks:
            hook.close()
        self.saver.close()
        self.guard.close()
