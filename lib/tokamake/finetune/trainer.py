"""The loop of finetuning: from a prepared run to its best checkpoint.

It shares engine and step with pretraining, but counts epochs of rows and scores the model after
each. All ranks run this code together, and each of its decisions is the same on all ranks.
"""

import math
import shutil
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tokamake import files
from tokamake.checkpoint.native.resume_state import ResumeState, read_state
from tokamake.config.resolved_run import Run
from tokamake.data.samples.loader import StepBatch
from tokamake.errors import UserError
from tokamake.finetune.epochs import FILE, EpochOrder, History, read_history
from tokamake.finetune.finetune_run import FinetuneRun
from tokamake.finetune.metrics import scores
from tokamake.finetune.row_logits import RowBatches, row_logits
from tokamake.finetune.rows import LabeledRows
from tokamake.runtime.rank_errors import raise_on_all_ranks
from tokamake.runtime.ranks import Ranks
from tokamake.schedules import Schedule
from tokamake.train import job_progress
from tokamake.train.checkpoints import resume
from tokamake.train.checkpoints.resume import ResumePoint, load_newest_whole
from tokamake.train.hooks import FinishedStep, Hook
from tokamake.train.loop import Job, Loop
from tokamake.train.objectives.classification.rows import TaskRows
from tokamake.train.step_result import StepResult

if TYPE_CHECKING:
    import torch

_NUM_SAFE = 2
"""Newest checkpoints that stay beside the best one: the last may be damaged."""


class TaskData(NamedTuple):
    """Tokenized rows of a run."""

    train: LabeledRows
    validation: LabeledRows


class StepLines(Hook):
    """Prints the loss of steps."""

    def __init__(self, ranks: Ranks, last_step: int) -> None:
        self._ranks, self._last_step = ranks, last_step

    def end_step(self, finished: FinishedStep) -> None:
        """Print a line, if one is due."""
        if finished.is_logged:
            self._ranks.print_once(
                f"step {finished.state.step}/{self._last_step}: loss {finished.result.loss:.4f}, "
                f"learning rate {finished.learning_rate:.3g}, "
                f"gradient norm {finished.result.grad_norm:.3g}"
            )


class FinetuneTrainer(Loop):
    """The loop of finetuning; a sample is a row, of an epoch."""

    def __init__(
        self, finetune_run: FinetuneRun, run: Run, *, data: TaskData, start: ResumePoint, job: Job
    ) -> None:
        super().__init__(run, job)
        self._finetune, self.data = finetune_run.finetune, data
        self.build_engine(continues=start.resumed is not None)
        self.history = History()
        if start.resumed:
            start = load_newest_whole(self.engine.load, run, ranks=self.ranks, start=start)
            assert start.resumed is not None, "it loaded a checkpoint"
            with raise_on_all_ranks():
                self.history = read_history(start.resumed)
            self.ranks.print_once(f"{run.output}: continuing at step {start.state.step}")
        self.state = start.state
        self.schedule = Schedule(run.train)
        mesh = self.engine.mesh
        # Tensor-parallel ranks may divide sequences.
        multiple = math.lcm(8, mesh.tensor.size)
        order = EpochOrder(data.train, run.train, seed=run.seed, mesh=mesh, multiple=multiple)
        self.steps = map(order.step, count(self.state.step))
        self.batches = RowBatches(mesh.data, run.train.micro_batch_size, multiple)
        self.steps_per_epoch = finetune_run.steps_per_epoch(len(data.train))
        self.last_step = run.train.train_steps
        self.hooks.append(StepLines(self.ranks, self.last_step))

    # ---- The loop ----

    def train(self) -> ResumeState:
        """Train until the last step, a stop signal or the end of the job."""
        with self.running():
            while True:
                if self._epoch_has_ended():
                    self.end_epoch()
                if self.stopped or self.state.step == self.last_step:
                    break
                result = self.step()
                if result and result.stop:
                    self.save()
                    self.stopped = self.stopping.agree()
                    break
                if self.state.step % self.run.train.save_interval == 0:
                    self.save()
        if self.stopped and not self.is_finished:
            job_progress.say_stopped(self.stopped, self.state.step, ranks=self.ranks)
        return self.state

    @property
    def is_finished(self) -> bool:
        """Whether all epochs have ended and are scored."""
        return len(self.history.epochs) == self._finetune.epochs

    def _epoch_has_ended(self) -> bool:
        """Whether the last step ended an epoch that is not scored yet."""
        epoch, place = divmod(self.state.step, self.steps_per_epoch)
        return not place and epoch > len(self.history.epochs)

    def is_logged(self, result: StepResult) -> bool:  # noqa: ARG002
        return self.state.step % self.run.train.log_interval == 0

    def respond(self, result: StepResult, batch: StepBatch) -> bool:
        """Add the loss of a step to its epoch, unless training has diverged."""
        if not math.isfinite(result.loss) or not (
            result.skipped or math.isfinite(result.grad_norm)
        ):
            raise UserError(
                f"step {self.state.step + 1}: the loss is {result.loss}, the gradient norm "
                f"{result.grad_norm}: training has diverged; lower train.optimizer.learning_rate"
            )
        self.history = self.history.after_step(result.loss, batch.global_batch_size)
        return True

    def end_epoch(self) -> None:
        """Score the model on the validation rows, and save it."""
        task, heartbeat = self._finetune.task, self.heartbeat

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
        self.ranks.print_once(
            f"epoch {record.epoch}/{self._finetune.epochs}: train loss {record.train_loss:.4f}, "
            f"{shown}{' (best)' if is_best else ''}"
        )
        self.save()

    # ---- Checkpoints ----

    def save(self) -> None:
        """Save a checkpoint; then delete those that are neither new nor the best."""
        self.heartbeat.beat("saves")
        folder = self.run.output / resume.SAVING / f"global_step{self.state.step}"
        progress = {
            "iteration": self.state.step,
            "consumed_samples": self.state.consumed_samples,
            "consumed_tokens": 0,
            "run_digest": self.state.digest,
        }
        if self._finetune.task.head == "classes":
            progress["labels"] = self._finetune.task.labels
        self.deadline.begin_saving()
        self.engine.save(folder, progress).wait()
        with raise_on_all_ranks():
            if self.ranks.rank == 0:
                files.write_json(folder / FILE, self.history.to_json())
                saved = resume.commit(self.run.output, self.state)
                job_progress.note(self.state.step)
                self._delete_old()
                print(f"saved {saved}", flush=True)
        self.deadline.end_saving()

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
