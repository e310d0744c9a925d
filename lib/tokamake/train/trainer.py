"""The training loop: from a resolved run to its last checkpoint.

`train_run` is what happens in a run; `Trainer.train` what happens around each step. All ranks run
this code together, and each of its decisions is the same on all ranks.
"""

import time
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING

from tokamake import plugins
from tokamake.checkpoint.native.resume_state import ResumeState, run_since_change
from tokamake.config.resolved_run import Run
from tokamake.data.samples.fim.samples import training_samples
from tokamake.data.samples.index_folder import read_index
from tokamake.data.samples.loader import StepBatch
from tokamake.errors import UserError
from tokamake.preflight.checks import check_run, check_until_step, check_updated, step_of_samples
from tokamake.preflight.packages import check_packages
from tokamake.runtime.cores import ahead
from tokamake.runtime.exit_status import Stopped
from tokamake.runtime.rank_errors import raise_on_all_ranks, report_from_any_rank
from tokamake.runtime.ranks import Ranks
from tokamake.schedules import Schedule
from tokamake.train import job_progress
from tokamake.train.batch import StepSamples, steps_of_rank
from tokamake.train.checkpoints import resume
from tokamake.train.checkpoints.loading import load_newest_whole, newest_before
from tokamake.train.checkpoints.resume import ResumePoint
from tokamake.train.checkpoints.saving import CheckpointSaver
from tokamake.train.checkpoints.summary import write_summary
from tokamake.train.data_verification import verify_data
from tokamake.train.numerics import deterministic_algorithms, with_precision
from tokamake.train.run_environment import write_environment
from tokamake.train.stability.heartbeat import Heartbeat, watched
from tokamake.train.stability.step_guard import StepGuard
from tokamake.train.stability.stragglers import Stragglers
from tokamake.train.startup_log import startup_log
from tokamake.train.step_profile import StepProfile
from tokamake.train.step_result import NOTHING, StepResult
from tokamake.train.stopping.deadline import Deadline
from tokamake.train.stopping.stop_signals import on_signals
from tokamake.train.stopping.stopping import Stopping
from tokamake.train.training_log import TrainingLog
from tokamake.train.validation import open_validation_splits

if TYPE_CHECKING:
    import torch


def train_run(
    run: Run,
    ranks: Ranks,
    *,
    device: "torch.device",
    until_step: int | None = None,
    until_samples: int | None = None,
    minutes: float | None = None,
) -> int:
    """Train a run from its start or its last checkpoint; do nothing if it is already finished.

    Args:
        until_step: step to end at; None: the end of the run.
        until_samples: consumed samples to end at, rounded down to a whole step.
        minutes: how long this job may take; None: what its scheduler says.

    Returns:
        Exit status: 0, or one of `Stopped` if steps are left.

    Raises:
        UserError: the run cannot start or has diverged; all ranks raise it.
    """
    run = with_precision(run, device)
    with (
        deterministic_algorithms(run.train.deterministic),
        watched(run, ranks) as heartbeat,
    ):
        # Check everything before a model is built.
        with raise_on_all_ranks():
            index = read_index(run.index)
            check_run(run, index=index, world_size=ranks.world_size, device=device)
            check_packages(run.train)
            check_until_step(run, until_step)

        # Rank 0 locks the output folder while training continues.
        with resume.locked_output(run, ranks, index=index, beat=heartbeat.beat) as start:
            state, current = start.state, run_since_change(run, start.state)
            with raise_on_all_ranks():
                if until_samples is not None:
                    until_step = step_of_samples(current, until_samples)
                check_until_step(current, until_step)
            last_step = until_step or current.train.train_steps
            if state.step >= last_step and not start.unvalidated:
                suffix = ", the last" if state.step == current.train.train_steps else ""
                ranks.print_once(
                    f"{run.output}: already at step {state.step}{suffix}; nothing to train"
                )
            else:
                with raise_on_all_ranks():
                    ranks.print_once(
                        startup_log(current, ranks, device=device, resumed=start.resumed)
                    )
                    if ranks.rank == 0:
                        write_environment(run)
                deadline = Deadline.of_job(run.output, ranks, minutes=minutes)
                trainer = Trainer(
                    run,
                    ranks,
                    device=device,
                    start=start,
                    until_step=until_step,
                    deadline=deadline,
                    heartbeat=heartbeat,
                )
                state = trainer.train()
                current, last_step = trainer.run, trainer.last_step
            if state.step < last_step:
                assert trainer.stopped
                return trainer.stopped
            check_updated(current, step=state.step, updates=state.updates)

            # train.json tells the workflow that this segment of the run is finished.
            with raise_on_all_ranks():
                if ranks.rank == 0:
                    write_summary(current, resume.state_at(run.output, last_step, state=state))
    return 0


class Trainer:
    """One rank's part of a run.

    Attributes:
        run: the resolved run, with the steps that are left after its last change.
        state: finished steps, consumed samples and training time.
        unvalidated: whether an earlier job stopped before the validation of its last step.
        stopped: why it was asked to stop, if it was.
    """

    def __init__(
        self,
        run: Run,
        ranks: Ranks,
        *,
        device: "torch.device",
        start: ResumePoint,
        until_step: int | None,
        deadline: Deadline,
        heartbeat: Heartbeat,
    ) -> None:
        self.ranks, self._resolved, self._until_step = ranks, run, until_step
        self.unvalidated = start.unvalidated
        self.deadline, self.heartbeat = deadline, heartbeat
        self.stopping = Stopping(run.output, ranks, deadline=deadline)
        self.stopped: Stopped | None = None
        hosts = heartbeat.hosts
        self.stragglers = Stragglers(run.output, hosts, rank=ranks.rank, device=device)
        self.profile = StepProfile(
            run.output, run.train.profile_steps, rank=ranks.rank, device=device
        )

        # ---- Data ----
        with raise_on_all_ranks():
            verify = ranks.rank == 0  # one rank is enough
            self.samples = training_samples(run, verify=verify)
            self.validation_splits = open_validation_splits(run, verify=verify)
        verify_data(run, ranks, read_index(run.index), beat=heartbeat.beat)

        # ---- Model, optimizer and schedule ----
        # Imported late: DeepSpeed takes seconds, and a finished run does not need it.
        backend = plugins.load("train/backends", run.train.backend)
        checkpoint = resume.checkpoint_to_load(run, ranks, start=start)
        heartbeat.beat("builds the model")
        self.engine = backend.Engine(run, ranks, device=device, continues=checkpoint is not None)
        heartbeat.set_group_timeouts()
        if start.resumed:
            start = load_newest_whole(self.engine.load, run, ranks=ranks, start=start)
        elif checkpoint:
            self.engine.load(checkpoint)
            self.engine.check_finite(checkpoint)
        self._begin_at(start)

    def _begin_at(self, start: ResumePoint) -> None:
        """Prepare to continue from the checkpoint that is loaded, or from the start of the run."""
        run, ranks, self.state = self._resolved, self.ranks, start.state
        if start.resumed:
            ranks.print_once(f"{run.output}: continuing at step {self.state.step}")
        # The checkpoint that was loaded decides how many steps a changed run has.
        self.run = run_since_change(run, self.state)
        self.last_step = self._until_step or self.run.train.train_steps
        self.schedule = Schedule(self.run.train)

        # ---- Checkpoints, metrics and journal ----
        self.saver = CheckpointSaver(
            run, ranks, engine=self.engine, deadline=self.deadline, start=start
        )
        self.log = TrainingLog(
            self.run,
            ranks,
            done=self.state.step,
            stragglers=self.stragglers,
            corpora=self.samples.corpora,
        )
        self.guard = StepGuard(
            self.run, ranks, engine=self.engine, samples=self.samples, start=self.state
        )
        self.steps = self._read_ahead()

    # ---- The loop ----

    def train(self) -> ResumeState:
        """Train until `last_step`, a stop signal or the end of the job; save the last step."""
        train = self.run.train
        with (
            closing(self),
            job_progress.retracted_on_error(self.ranks),
            on_signals(self.stopping.signals.note),
        ):
            if self.state.step == 0 or self.unvalidated:
                self.validate()
            while self.state.step < self.last_step:
                learning_rate = self.learning_rate()
                result = self.step(learning_rate)
                if result is None:  # back at a checkpoint
                    continue
                if result.saved:
                    self.saver.finish()
                is_due = self._due(train.log_interval) or self.state.step == 1 or result.stop
                if is_due:
                    next_rate = self.learning_rate()
                    self.log.training(self.state, result, learning_rate, next_rate=next_rate)
                is_validated = self._due(train.evaluation_interval)
                if result.stop or self._due(train.save_interval) or self._is_last():
                    self.save()
                    # A kill in the validation must not cost the steps before it.
                    if result.stop or is_validated:
                        self.saver.finish()
                if result.stop:
                    self.stopped = self.stopping.agree()
                # A person made the file `stop`, and can wait for a validation.
                if is_validated or self.stopped is Stopped.FILE:
                    self.validate()
                if result.stop:
                    break
            self.saver.finish()
            if self.stopped and self.state.step < self.last_step:
                job_progress.say_stopped(self.stopped, self.state.step, ranks=self.ranks)
            else:
                self.log.sync()  # for a validation after the save
        return self.state

    # ---- A step ----

    def step(self, learning_rate: float) -> StepResult | None:
        """Train on one global batch, or skip it as `skip_data` and `on_bad_step` say.

        Returns:
            What the step measured; None: its numbers are bad, and training is back at a checkpoint.

        Raises:
            UserError: training has diverged, or samples cannot be read.
        """
        begin = time.perf_counter()
        self.profile.begin(self.state.step + 1)
        self.heartbeat.beat("reads samples")
        batch = next(self.steps)
        if not batch.micro_batches:
            return self._leave_out(batch)
        self.heartbeat.beat("trains")
        reading = time.perf_counter() - begin
        result: StepResult = self.engine.train_step(
            batch.micro_batches,
            learning_rate=learning_rate,
            weight_decay=self.weight_decay(),
            judge=self.guard.judge,
            stop=self.stopping.is_asked(),
            saved=self.saver.written,
            samples=self._samples_of(batch),
        )
        if result.bad and (checkpoint := self._respond(result, batch)):
            self._go_back(checkpoint)
            return None
        self.profile.end(self.state.step + 1)
        seconds = time.perf_counter() - begin
        self.guard.note(self.state.step + 1, result)
        self.state = self.state.after_step(batch.global_batch_size, seconds, updated=result.updated)
        self.state = self.state._replace(guard=self.guard.state)
        self.log.count_step(result, batch.global_batch_size, seconds=seconds, reading=reading)
        self.heartbeat.end_step(self.state.step)
        return result

    def _samples_of(self, batch: StepBatch) -> StepSamples:
        """This rank's samples, with their corpora if losses of these are recorded."""
        numbers = batch.sample_numbers
        if not self.run.train.log_corpus_losses:
            return StepSamples(numbers)
        return StepSamples(numbers, self.samples.corpus_numbers(numbers), len(self.samples.corpora))

    def _leave_out(self, batch: StepBatch) -> StepResult:
        """Count a step whose data are left out."""
        self.state = self.state.after_step(batch.global_batch_size, 0.0, updated=False)
        self.heartbeat.end_step(self.state.step)
        self.ranks.print_once(f"step {self.state.step}: skipped, as skip_data or on_bad_step says")
        return NOTHING

    def _respond(self, result: StepResult, batch: StepBatch) -> ResumePoint | None:
        """Do what `train.on_bad_step` says; return the checkpoint to go back to, if any."""
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

    def learning_rate(self) -> float:
        rate = self.schedule.learning_rate(self.state.step, self.state.consumed_samples)
        return rate * self.guard.state.rate_factor

    def weight_decay(self) -> float:
        return self.schedule.weight_decay(self.state.step, self.state.consumed_samples)

    # ---- Validation and checkpoints ----

    def validate(self) -> None:
        """Measure each validation split."""
        measured = {}
        for name, validation_split in self.validation_splits.items():
            micro_batches = validation_split.micro_batches(self.run, self.engine.mesh)
            beating = self.heartbeat.counted(micro_batches, "validates")
            measured[name] = self.engine.validate(report_from_any_rank(beating, self.ranks))
        if measured:
            self.log.validation(self.state, measured)
            self.saver.note_validation()

    def save(self) -> None:
        """Begin to save a checkpoint; training may continue before it is on disk."""
        self.heartbeat.beat("saves")
        self.saver.finish()
        # A checkpoint on disk must not be newer than the records on disk.
        self.log.sync()
        self.saver.begin(self.state)

    # ---- Helpers ----

    def _due(self, interval: int) -> bool:
        return self.state.step % interval == 0 or self.state.step == self.run.train.train_steps

    def _is_last(self) -> bool:
        return self.state.step == self.last_step

    def _read_ahead(self) -> Iterator[StepBatch]:
        """Steps that are left; the next one is read while the device computes."""
        steps = steps_of_rank(
            self.samples,
            self.run.train,
            mesh=self.engine.mesh,
            consumed_samples=self.state.consumed_samples,
            left_out=self.guard.left_out,
        )
        return report_from_any_rank(ahead(steps), self.ranks)

    def close(self) -> None:
        """Wait until old checkpoints are deleted, and close the files of rank 0."""
        self.profile.close()
        self.saver.close()
        self.log.close()
        self.guard.close()
