"""The step of a training loop, which pretraining and finetuning share.

A loop has an engine, a schedule and an iterator of `steps`. It decides when to validate and to
save; hooks watch each step.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from tokamake import plugins
from tokamake.checkpoint.native.resume_state import ResumeState
from tokamake.config.resolved_run import Run
from tokamake.data.samples.loader import StepBatch
from tokamake.runtime.exit_status import Stopped
from tokamake.runtime.ranks import Ranks
from tokamake.schedules import Schedule
from tokamake.train import job_progress
from tokamake.train.bad_steps import BadStep
from tokamake.train.batch import SampleIds
from tokamake.train.hooks import FinishedStep, Hook
from tokamake.train.hooks.heartbeat import Heartbeat
from tokamake.train.metrics import Record
from tokamake.train.step_result import NOTHING, StepResult
from tokamake.train.stopping.deadline import Deadline
from tokamake.train.stopping.stopping import Stopping, on_signals

if TYPE_CHECKING:
    import torch


class Job(NamedTuple):
    """Surroundings of a run on this rank."""

    ranks: Ranks
    device: "torch.device"
    deadline: Deadline
    """End of this job."""
    heartbeat: Heartbeat
    """Watch over the ranks."""


class Loop(ABC):
    """One rank's part of a run; all ranks call its methods together.

    Attributes:
        run: the resolved run, with its precision chosen.
        state: finished steps, consumed samples and training time.
        last_step: step to end at.
        stopped: why the run was asked to stop, if it was.
    """

    engine: Any
    state: ResumeState
    last_step: int
    schedule: Schedule
    steps: Iterator[StepBatch]

    def __init__(self, run: Run, job: Job) -> None:
        if text := str(job.deadline):
            job.ranks.print_once(text)
        self.run, self.ranks = run, job.ranks
        self.device, self.deadline, self.heartbeat = job.device, job.deadline, job.heartbeat
        self.hooks: list[Hook] = [self.heartbeat]
        self.stopping = Stopping(run.output, job.ranks, deadline=job.deadline)
        self.stopped: Stopped | None = None

    def build_engine(self, *, continues: bool) -> None:
        """Build the model and its optimizer; if a run `continues`, a checkpoint has the weights."""
        # Imported late: DeepSpeed takes seconds, and a finished run does not need it.
        backend = plugins.load("train/backends", self.run.train.backend)
        self.heartbeat.beat("builds the model")
        self.engine = backend.Engine(self.run, self.ranks, device=self.device, continues=continues)
        self.heartbeat.set_group_timeouts()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Note stop signals while the loop runs; close its files at the end."""
        with (
            closing(self),
            job_progress.retracted_on_error(self.ranks),
            on_signals(self.stopping.signals.note),
        ):
            yield

    def step(self) -> StepResult | None:
        """Train on one global batch, or leave it out; return None if the loop has gone back.

        Raises:
            UserError: training has diverged, or samples cannot be read.
        """
        begin, reading, seconds = time.perf_counter(), 0.0, 0.0
        learning_rate, result = self.learning_rate(), NOTHING
        for hook in self.hooks:
            hook.begin_step(self.state.step + 1)
        self.heartbeat.beat("reads samples")
        batch = next(self.steps)
        if batch.micro_batches:
            self.heartbeat.beat("trains")
            reading = time.perf_counter() - begin
            result = self.engine.train_step(
                batch.micro_batches,
                learning_rate=learning_rate,
                weight_decay=self.schedule.weight_decay(*self._progress),
                find_fault=self.find_fault,
                stop=self.stopping.is_asked(),
                saved=self.has_written,
                samples=self.samples_of(batch),
            )
            seconds = time.perf_counter() - begin
            if not self.respond(result, batch):
                return None
        num_samples = batch.global_batch_size
        self.state = self.state.after_step(num_samples, seconds, updated=result.updated)
        finished = FinishedStep(
            self.state,
            result,
            learning_rate,
            self.learning_rate(),
            num_samples,
            seconds,
            reading,
            self.is_logged(result),
        )
        for hook in self.hooks:
            hook.end_step(finished)
        return result

    # ---- A loop of a kind may differ in these ----

    def find_fault(self, loss: float, grad_norm: float) -> BadStep | None:  # noqa: ARG002
        """Find the fault of a step by its loss and gradient norm, before the update."""
        return None

    @property
    def has_written(self) -> bool:
        """Whether this rank has written its files of the checkpoint that is being saved."""
        return False

    def samples_of(self, batch: StepBatch) -> SampleIds:
        return SampleIds(batch.sample_numbers)

    @abstractmethod
    def respond(self, result: StepResult, batch: StepBatch) -> bool:
        """Take the result of a step; return False if the loop has gone back to a checkpoint."""

    @abstractmethod
    def is_logged(self, result: StepResult) -> bool:
        """Whether a record is due after the last step."""

    def learning_rate(self) -> float:
        """Learning rate of the next step."""
        return self.schedule.learning_rate(*self._progress)

    @property
    def _progress(self) -> tuple[int, int]:
        return self.state.step, self.state.consumed_samples

    def record(self, record: Record) -> None:
        """Hand a new record of metrics.jsonl to the hooks."""
        for hook in self.hooks:
            hook.recorded(record)

    def close(self) -> None:
        """Close the hooks."""
        for hook in self.hooks:
            hook.close()
