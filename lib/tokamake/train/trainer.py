"""The training loop: from a resolved run to its last checkpoint.

`train.start_run` has checked the run; `train_run` is a job, `Trainer.train` the loop. All ranks run
this code together, and each of its decisions is the same on all ranks.
"""

from tokamake.checkpoint.native.resume_state import ResumeState, run_since_change
from tokamake.config.resolved_run import Run
from tokamake.data.samples.fim.samples import training_samples
from tokamake.data.samples.loader import StepBatch
from tokamake.errors import UserError
from tokamake.preflight.data import IndexContent
from tokamake.preflight.run import check_updated
from tokamake.runtime.cores import prefetched
from tokamake.runtime.exit_status import Stopped
from tokamake.runtime.rank_errors import raise_on_all_ranks, report_from_any_rank
from tokamake.schedules import Schedule
from tokamake.train import job_progress
from tokamake.train.bad_steps import BadStep
from tokamake.train.batch import SampleIds, steps_of_rank
from tokamake.train.checkpoints import resume
from tokamake.train.checkpoints.resume import ResumePoint, load_newest_whole, newest_before
from tokamake.train.checkpoints.saving import CheckpointSaver
from tokamake.train.checkpoints.summary import write_environment, write_summary
from tokamake.train.data_verification import verify_data
from tokamake.train.hooks import Training, open_hooks
from tokamake.train.loop import Job, Loop
from tokamake.train.stability.step_guard import StepGuard
from tokamake.train.startup_log import startup_log
from tokamake.train.step_result import StepResult
from tokamake.train.validation import open_validation_splits


def train_run(
    run: Run, job: Job, *, index: IndexContent, start: ResumePoint, until_step: int | None = None
) -> int:
    """Train a checked run from `start` to `until_step`, or to its end, if a step is left.

    Returns:
        Exit status: 0, or one of `Stopped` if steps are left.
    """
    ranks, state, current = job.ranks, start.state, run_since_change(run, start.state)
    last_step = until_step or current.train.train_steps
    if state.step >= last_step and not start.unvalidated:
        place = f"step {state.step}" + ", the last" * (state.step == current.train.train_steps)
        ranks.print_once(f"{run.output}: already at {place}; nothing to train")
    else:
        with raise_on_all_ranks():
            text = startup_log(current, ranks, device=job.device, resumed=start.resumed)
            ranks.print_once(text)
            if ranks.rank == 0:
                write_environment(run)
        trainer = Trainer(run, job, index=index, start=start, until_step=until_step)
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


class Trainer(Loop):
    """The loop of pretraining; `run` has the steps that are left after the run's last change."""

    def __init__(
        self,
        run: Run,
        job: Job,
        *,
        index: IndexContent,
        start: ResumePoint,
        until_step: int | None,
    ) -> None:
        super().__init__(run, job)
        self._resolved, self._until_step = run, until_step
        self.unvalidated = start.unvalidated  # an earlier job stopped before its last validation

        # ---- Data ----
        with raise_on_all_ranks():
            verify = self.ranks.rank == 0  # one rank is enough
            self.samples = training_samples(run, verify=verify)
            self.validation_splits = open_validation_splits(run, index, verify=verify)
        verify_data(run, self.ranks, index, beat=self.heartbeat.beat)

        # ---- Model and optimizer ----
        checkpoint = resume.checkpoint_to_load(run, self.ranks, start=start)
        self.build_engine(continues=checkpoint is not None)
        if start.resumed:
            start = load_newest_whole(self.engine.load, run, ranks=self.ranks, start=start)
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

        # ---- Checkpoints, hooks and journal ----
        self.saver = CheckpointSaver(
            run, ranks, engine=self.engine, deadline=self.deadline, start=start
        )
        self.hooks = open_hooks(
            Training(
                self.run,
                self.state,
                ranks,
                self.device,
                hosts=self.heartbeat.hosts,
                corpora=self.samples.corpora,
                heartbeat=self.heartbeat,
                record=self.record,
            )
        )
        self.guard = StepGuard(
            self.run, ranks, engine=self.engine, samples=self.samples, start=self.state
        )
        steps = steps_of_rank(
            self.samples,
            self.run.train,
            mesh=self.engine.mesh,
            consumed_samples=self.state.consumed_samples,
            left_out=self.guard.left_out,
        )
        # The next step is read while the device computes.
        self.steps = report_from_any_rank(prefetched(steps), ranks)

    # ---- The loop ----

    def train(self) -> ResumeState:
        """Train until `last_step`, a stop signal or the end of the job; save the last step."""
        train = self.run.train
        with self.running():
            if self.state.step == 0 or self.unvalidated:
                self.validate()
            while self.state.step < self.last_step:
                result = self.step()
                if result is None:  # back at a checkpoint
                    continue
                is_validated = self._due(train.evaluation_interval)
                is_last = self.state.step == self.last_step
                if result.stop or self._due(train.save_interval) or is_last:
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
                self._sync()  # for a validation after the save
        return self.state

    def _due(self, interval: int) -> bool:
        return self.state.step % interval == 0 or self.state.step == self.run.train.train_steps

    # ---- A step: the guard decides its update, and what follows ----

    def learning_rate(self) -> float:
        return super().learning_rate() * self.guard.state.rate_factor  # bad steps lower it

    def find_fault(self, loss: float, grad_norm: float) -> BadStep | None:
        return self.guard.find_fault(loss, grad_norm)

    @property
    def has_written(self) -> bool:
        return self.saver.written

    def is_logged(self, result: StepResult) -> bool:
        return self._due(self.run.train.log_interval) or self.state.step == 1 or result.stop

    def samples_of(self, batch: StepBatch) -> SampleIds:
        """This rank's samples, with their corpora if losses of these are recorded."""
        numbers = batch.sample_numbers
        if not self.run.train.log_corpus_losses:
            return SampleIds(numbers)
        return SampleIds(numbers, self.samples.corpus_numbers(numbers), len(self.samples.corpora))

    def respond(self, result: StepResult, batch: StepBatch) -> bool:
        """Do what `train.on_bad_step` says; put a checkpoint in place if all ranks wrote it."""
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

    # ---- Validation and checkpoints ----

    def validate(self) -> None:
        """Measure each validation split."""
        measured = {}
        for name, validation_split in self.validation_splits.items():
            micro_batches = validation_split.micro_batches(self.run, self.engine.mesh)
            beating = self.heartbeat.counted(micro_batches, "validates")
            measured[name] = self.engine.validate(report_from_any_rank(beating, self.ranks))
        if measured:
            for hook in self.hooks:
                hook.validated(self.state, measured)
            self.saver.note_validation()

    def save(self) -> None:
        """Begin to save a checkpoint; training may continue before it is on disk."""
        self.heartbeat.beat("saves")
        self.saver.finish()
        # A checkpoint on disk must not be newer than the records on disk.
        self._sync()
        self.saver.begin(self.state)

    def _sync(self) -> None:
        for hook in self.hooks:
            hook.sync()

    def close(self) -> None:
        """Close the hooks and the journal; wait until old checkpoints are deleted."""
        super().close()
        self.saver.close()
        self.guard.close()
