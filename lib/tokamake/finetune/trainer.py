"""The loop of finetuning: from a prepared run to its best checkpoint.

It uses the engine of pretraining, with its optimizers, precisions, ranks and checkpoints; what
differs is that it counts epochs of rows, and scores the model after each. All ranks run this code
together, and each of its decisions is the same on all ranks.
"""

import math
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tokamake import files, plugins
from tokamake.checkpoint.native.resume_state import ResumeState, read_state
from tokamake.config.resolved_run import Run
from tokamake.errors import UserError
from tokamake.finetune.epochs import FILE, EpochOrder, History, read_history
from tokamake.finetune.finetune_run import FinetuneRun
from tokamake.finetune.metrics import scores
from tokamake.finetune.row_logits import RowBatches, row_logits
from tokamake.finetune.rows import LabeledRows
from tokamake.runtime.exit_status import Stopped
from tokamake.runtime.rank_errors import raise_on_all_ranks
from tokamake.runtime.ranks import Ranks
from tokamake.schedules import Schedule
from tokamake.train import job_progress
from tokamake.train.checkpoints import resume
from tokamake.train.checkpoints.loading import load_newest_whole
from tokamake.train.checkpoints.resume import ResumePoint
from tokamake.train.stability.heartbeat import Heartbeat
from tokamake.train.stopping.deadline import Deadline
from tokamake.train.stopping.stop_signals import on_signals
from tokamake.train.stopping.stopping import Stopping
from tokamake.train.task_rows import TaskRows

if TYPE_CHECKING:
    import torch

_NUM_SAFE = 2
"""Newest checkpoints that stay beside the best one: the last may be damaged."""


class TaskData(NamedTuple):
    """Tokenized rows of a run."""

    train: LabeledRows
    validation: LabeledRows


class Job(NamedTuple):
    """Surroundings of a run on this rank."""

    ranks: Ranks
    device: "torch.device"
    deadline: Deadline
    """End of this job."""
    heartbeat: Heartbeat
    """Watch over the ranks."""


class FinetuneTrainer:
    """One rank's part of a run.

    Attributes:
        state: finished steps and trained rows.
        stopped: why it was asked to stop, if it was.
    """

    def __init__(
        self,
        finetune_run: FinetuneRun,
        run: Run,
        *,
        data: TaskData,
        start: ResumePoint,
        job: Job,
    ) -> None:
        self._finetune, self.run, self.data, self._job = finetune_run.finetune, run, data, job
        self.stopping = Stopping(run.output, job.ranks, deadline=job.deadline)
        self.stopped: Stopped | None = None
        backend = plugins.load("train/backends", run.train.backend)
        job.heartbeat.beat("builds the model")
        self.engine: Any = backend.Engine(
            run, job.ranks, device=job.device, continues=start.resumed is not None
        )
        job.heartbeat.set_group_timeouts()
        self.history = History()
        if start.resumed:
            start = load_newest_whole(self.engine.load, run, ranks=job.ranks, start=start)
            assert start.resumed is not None, "it loaded a checkpoint"
            with raise_on_all_ranks():
                self.history = read_history(start.resumed)
            job.ranks.print_once(f"{run.output}: continuing at step {start.state.step}")
        self.state = start.state
        self.schedule = Schedule(run.train)
        mesh = self.engine.mesh
        # Tensor-parallel ranks may divide sequences.
        multiple = math.lcm(8, mesh.tensor.size)
        self.order = EpochOrder(data.train, run.train, seed=run.seed, mesh=mesh, multiple=multiple)
        self.batches = RowBatches(mesh.data, run.train.micro_batch_size, multiple)
        self.steps_per_epoch = finetune_run.steps_per_epoch(len(data.train))
        self.last_step = run.train.train_steps

    # ---- The loop ----

    def train(self) -> ResumeState:
        """Train until the last step, a stop signal or the end of the job."""
        with (
            job_progress.retracted_on_error(self._job.ranks),
            on_signals(self.stopping.signals.note),
        ):
            while True:
                if self._epoch_has_ended():
                    self.end_epoch()
                if self.stopped or self.state.step == self.last_step:
                    break
                if self.step():
                    self.save()
                    self.stopped = self.stopping.agree()
                    break
                if self.state.step % self.run.train.save_interval == 0:
                    self.save()
        if self.stopped and not self.is_finished:
            job_progress.say_stopped(self.stopped, self.state.step, ranks=self._job.ranks)
        return self.state

    @property
    def is_finished(self) -> bool:
        """Whether all epochs have ended and are scored."""
        return len(self.history.epochs) == self._finetune.epochs

    def _epoch_has_ended(self) -> bool:
        """Whether the last step ended an epoch that is not scored yet."""
        epoch, place = divmod(self.state.step, self.steps_per_epoch)
        return not place and epoch > len(self.history.epochs)

    def step(self) -> bool:
        """Train on one global batch.

        Returns:
            Whether the run was asked to stop.

        Raises:
            UserError: training has diverged.
        """
        begin, heartbeat = time.perf_counter(), self._job.heartbeat
        heartbeat.beat("trains")
        number = self.state.step
        rows = self.order.step(number)
        rate = self.schedule.learning_rate(number, self.state.consumed_samples)
        result = self.engine.train_step(
            rows.micro_batches,
            learning_rate=rate,
            weight_decay=self.schedule.weight_decay(number, self.state.consumed_samples),
            stop=self.stopping.is_asked(),
            samples=rows.samples,
        )
        if not math.isfinite(result.loss) or not (
            result.skipped or math.isfinite(result.grad_norm)
        ):
            raise UserError(
                f"step {number + 1}: the loss is {result.loss}, the gradient norm "
                f"{result.grad_norm}: training has diverged; lower train.optimizer.learning_rate"
            )
        seconds = time.perf_counter() - begin
        self.state = self.state.after_step(rows.num_rows, seconds, updated=result.updated)
        self.history = self.history.after_step(result.loss, rows.num_rows)
        heartbeat.end_step(self.state.step)
        if self.state.step % self.run.train.log_interval == 0:
            self._job.ranks.print_once(
                f"step {self.state.step}/{self.last_step}: loss {result.loss:.4f}, learning rate "
                f"{rate:.3g}, gradient norm {result.grad_norm:.3g}"
            )
        return bool(result.stop)

    def end_epoch(self) -> None:
        """Score the model on the validation rows, and save it."""
        task, heartbeat = self._finetune.task, self._job.heartbeat

        def forward(micro_batches: Iterable[TaskRows]) -> "Iterator[torch.Tensor]":
            beating: Iterator[TaskRows] = heartbeat.counted(micro_batches, "validates")
            logits: Iterator[torch.Tensor] = self.engine.sample_logits(beating)
            return logits

        logits = row_logits(forward, self.data.validation, batches=self.batches)
        if not np.isfinite(logits).all():
            raise UserError(
                f"step {self.state.step}: a logit is not finite: training has diverged; lower "
                "train.optimizer.learning_rate"
            )
        values = scores(logits, self.data.validation.labels, head=task.head, names=task.metrics)
        self.history = self.history.after_epoch(self.state.step, values)
        record = self.history.epochs[-1]
        shown = ", ".join(f"{name} {value:.4f}" for name, value in values.items())
        is_best = self.history.best(task.metrics[0]) == record
        self._job.ranks.print_once(
            f"epoch {record.epoch}/{self._finetune.epochs}: train loss {record.train_loss:.4f}, "
            f"{shown}{' (best)' if is_best else ''}"
        )
        self.save()

    # ---- Checkpoints ----

    def save(self) -> None:
        """Save a checkpoint; then delete those that are neither new nor the best."""
        self._job.heartbeat.beat("saves")
        folder = self.run.output / resume.SAVING / f"global_step{self.state.step}"
        progress = {
            "iteration": self.state.step,
            "consumed_samples": self.state.consumed_samples,
            "consumed_tokens": 0,
            "run_digest": self.state.digest,
        }
        if self._finetune.task.head == "classes":
            progress["labels"] = self._finetune.task.labels
        self._job.deadline.begin_saving()
        self.engine.save(folder, progress).wait()
        with raise_on_all_ranks():
            if self._job.ranks.rank == 0:
                files.write_json(folder / FILE, self.history.to_json())
                saved = resume.commit(self.run.output, self.state)
                job_progress.note(self.state.step)
                self._delete_old()
                print(f"saved {saved}", flush=True)
        self._job.deadline.end_saving()

    def _delete_old(self) -> None:
        best = self.history.best(self._finetune.task.metrics[0])
        steps = {}
        for folder in self.run.output.glob("global_step*"):
            state = read_state(folder)
            if state and state.digest == self.state.digest and folder.name[11:].isdecimal():
                steps[state.step] = folder
        kept = {*sorted(steps)[-_NUM_SAFE:], best.step if best else self.state.step}
        for step, folder in steps.items():
            if step not in kept:
                shutil.rmtree(folder)

    def best_checkpoint(self) -> Path:
        """Folder of the best epoch's checkpoint."""
        best = self.history.best(self._finetune.task.metrics[0])
        assert best is not None, "an epoch has ended"
        return self.run.output / f"global_step{best.step}"
