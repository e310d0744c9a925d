"""Epochs of the rows of a task: their order, and the scores of the model after each.

The order follows from the seed and the number of the epoch alone, so a run continues anywhere.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokamake import files
from tokamake.checkpoint.native.resume_state import ResumeState
from tokamake.config.finetune import FinetuneSettings
from tokamake.config.resolved_run import Run
from tokamake.data.samples.steps import StepBatch
from tokamake.errors import UserError
from tokamake.parallel.mesh import Mesh
from tokamake.runtime.rank_errors import raise_on_all_ranks
from tokamake.runtime.ranks import Ranks
from tokamake.train.hooks import FinishedStep, Hook
from tokamake.train.metrics import Validation
from tokamake.train.objectives._tasks import (
    MULTIPLE,
    RowBatches,
    RowsOfFiles,
    row_outputs,
    task_objective,
)
from tokamake.train.sampler import Sampler, Watch

FILE = "finetune.json"
"""File in the folder of a checkpoint, with the history until there."""


class EpochRecord(NamedTuple):
    """An epoch that has ended."""

    epoch: int
    """From 1."""
    step: int
    """Finished steps."""
    train_loss: float
    """Mean over the rows of the epoch, each before its step."""
    scores: dict[str, float]
    """Scores on the validation files, by metric."""


class History(NamedTuple):
    """Measurements of a run until a step."""

    epochs: tuple[EpochRecord, ...] = ()
    loss_sum: float = 0.0
    """Sum of the losses of the rows of the present epoch."""
    num_rows: int = 0
    """Rows of the present epoch that have been trained on."""

    def after_step(self, loss: float, num_rows: int) -> "History":
        """The history after one more step with a mean `loss` of `num_rows` rows."""
        total = self.loss_sum + loss * num_rows
        return self._replace(loss_sum=total, num_rows=self.num_rows + num_rows)

    def after_epoch(self, step: int, scores: dict[str, float]) -> "History":
        """The history after the end of an epoch."""
        loss = self.loss_sum / max(1, self.num_rows)
        record = EpochRecord(len(self.epochs) + 1, step, loss, scores)
        return History((*self.epochs, record))

    def best(self, metric: str) -> EpochRecord:
        """The epoch with the best score; the first of several."""
        return max(self.epochs, key=lambda record: record.scores[metric])

    def to_json(self) -> dict[str, Any]:
        """Content of `FILE`."""
        return {**self._asdict(), "epochs": [record._asdict() for record in self.epochs]}


def read_history(folder: Path) -> History:
    """Read the history in the folder of a checkpoint."""
    remedy = f"name another checkpoint in {folder.parent / 'latest'}"
    value = files.read_json(folder / FILE, remedy)
    try:
        records = tuple(EpochRecord(**record) for record in value["epochs"])
        return History(records, value["loss_sum"], value["num_rows"])
    except (KeyError, TypeError):
        raise UserError(f"{folder / FILE}: damaged; {remedy}") from None


class EpochHook(Hook):
    """Keeps the history of a run, and prints its epochs."""

    def __init__(self, finetune: FinetuneSettings, ranks: Ranks) -> None:
        self._finetune, self._ranks, self.history = finetune, ranks, History()

    def end_step(self, finished: FinishedStep) -> None:
        """Add the loss of a step to its epoch."""
        self.history = self.history.after_step(finished.result.loss, finished.num_samples)

    def validated(self, state: ResumeState, measured: dict[str, Validation]) -> None:
        """End an epoch."""
        values = {**measured["validation"].metrics}
        self.history = self.history.after_epoch(state.step, values)
        record = self.history.epochs[-1]
        shown = ", ".join(f"{name} {value:.4f}" for name, value in values.items())
        is_best = self.history.best(self._finetune.task.metrics[0]) == record
        self._ranks.print_once(
            f"epoch {record.epoch}/{self._finetune.epochs}: train loss {record.train_loss:.4f}, "
            f"{shown}{' (best)' if is_best else ''}"
        )


class TaskData(NamedTuple):
    """A task, and its tokenized rows."""

    finetune: FinetuneSettings
    train: RowsOfFiles
    validation: RowsOfFiles

    def make_sampler(self, run: Run, ranks: Ranks) -> "EpochSampler":
        """Sample the rows in epochs."""
        return EpochSampler(run, self, ranks=ranks)


def read_task_data(
    finetune: FinetuneSettings,
    tokenizer: Path,
    *,
    sequence_length: int,
    say: Callable[[str], None] = print,
) -> TaskData:
    """Read and tokenize the rows of a task; each must have a label."""
    read, task = {}, finetune.task
    objective = task_objective(task.objective)
    for name in ("train", "validation"):
        paths = getattr(finetune, f"{name}_files")
        rows: RowsOfFiles = objective.read_rows(
            paths, task, tokenizer=tokenizer, sequence_length=sequence_length
        )
        if rows.num_labeled < len(rows):
            raise UserError(
                f"finetune.{name}_files: {', '.join(paths)}: "
                f"{len(rows) - rows.num_labeled:,} of {len(rows):,} rows have no label, the first "
                f"is {rows.first_unlabeled}; name files with labels"
            )
        cut = f", {rows.num_cut:,} sequences cut to {sequence_length} tokens"
        say(f"{name}: {len(rows):,} rows of {task.name}{cut * bool(rows.num_cut)}")
        read[name] = rows
    return TaskData(finetune, **read)


class EpochSampler(Sampler):
    """Epochs of rows; each is scored and saved. A sample is a row, of an epoch."""

    saves_validated = True

    def __init__(self, run: Run, data: TaskData, *, ranks: Ranks) -> None:
        super().__init__(run)
        self.data, finetune = data, data.finetune
        self._hook = EpochHook(finetune, ranks)
        self._steps_per_epoch = -(-len(data.train) // run.train.global_batch_size)
        self.notes = {"consumed_tokens": 0}
        if finetune.task.head == "classes":
            self.notes["labels"] = finetune.task.labels

    @property
    def history(self) -> History:
        """Measurements until now."""
        return self._hook.history

    def hooks(self) -> list[Hook]:
        return [self._hook]

    def begin(self, resumed: Path | None) -> None:
        with raise_on_all_ranks():
            self._hook.history = read_history(resumed) if resumed else History()

    # ---- Steps ----

    def steps(
        self,
        state: ResumeState,
        mesh: Mesh,
        *,
        left_out: Sequence[tuple[int, int]],  # noqa: ARG002
    ) -> Iterator[StepBatch]:
        """Rows of the remaining steps. Ranks with fewer rows fill up their micro batches."""
        current, order = -1, np.zeros(0, np.int64)
        for step in count(state.step):
            epoch, place = divmod(step, self._steps_per_epoch)
            if epoch != current:
                generator = np.random.default_rng((self.run.seed, epoch))
                current, order = epoch, generator.permutation(len(self.data.train))
            yield self._step(order, epoch, place=place, mesh=mesh)

    def _step(
        self, order: npt.NDArray[np.int64], epoch: int, *, place: int, mesh: Mesh
    ) -> StepBatch:
        rows, train = self.data.train, self.run.train
        size, batch = train.micro_batch_size, train.global_batch_size
        chosen = order[place * batch : (place + 1) * batch]
        block = size * mesh.data.size
        starts = range(mesh.data.rank * size, -(-len(chosen) // block) * block, block)
        of_rank = [chosen[start : start + size] for start in starts]
        micro_batches = [
            rows.micro_batch(
                numbers,
                size,
                num_labels=len(chosen),
                multiple=_multiple(mesh),
                epoch=(self.run.seed, epoch),
            )
            for numbers in of_rank
        ]
        numbers = np.stack([self._sample_numbers(numbers, epoch) for numbers in of_rank])
        return StepBatch(epoch * len(rows) + place * batch, len(chosen), micro_batches, numbers)

    def _sample_numbers(self, numbers: npt.NDArray[np.int64], epoch: int) -> npt.NDArray[np.int64]:
        """A number for each sequence of a micro batch, another one in each epoch."""
        options = self.data.train.num_options
        filled = np.zeros(self.run.train.micro_batch_size, np.int64)
        filled[: len(numbers)] = numbers + epoch * len(self.data.train)
        of_sequences: npt.NDArray[np.int64] = filled[:, None] * options + np.arange(options)
        return of_sequences.reshape(-1)

    # ---- Ends of epochs ----

    def needs_validation(self, state: ResumeState) -> bool:
        """Whether the last step ended an epoch that is not scored yet."""
        epoch, place = divmod(state.step, self._steps_per_epoch)
        return not place and epoch > len(self.history.epochs)

    def validate(self, engine: Any, state: ResumeState, *, watch: Watch) -> dict[str, Validation]:
        """Score the model on the validation rows if an epoch has ended."""
        if not self.needs_validation(state):
            return {}
        rows, task = self.data.validation, self.data.finetune.task
        batches = RowBatches(
            engine.mesh.data, self.run.train.micro_batch_size, _multiple(engine.mesh)
        )
        outputs = row_outputs(
            lambda each: engine.sample_outputs(watch(each)), rows, batches=batches
        )
        if not np.isfinite(outputs).all():
            raise UserError(
                f"step {state.step}: an output of the model is not finite: training has diverged; "
                "lower train.optimizer.learning_rate"
            )
        values = task_objective(task.objective).row_scores(outputs, rows, task=task)
        return {"validation": Validation(None, values)}

    def validation_losses(self) -> Iterable[tuple[int, float]]:
        """Steps of the epochs; the first metric of the task decides."""
        name = self.data.finetune.task.metrics[0]
        return [(record.step, -record.scores[name]) for record in self.history.epochs]

    def recorder(self) -> Callable[[Path], None]:
        """Checkpoints hold the history until there."""
        history = self.history
        return lambda folder: files.write_json(folder / FILE, history.to_json())


def _multiple(mesh: Mesh) -> int:
    """Lengths of sequences are multiples of this: tensor-parallel ranks may divide them."""
    return math.lcm(MULTIPLE, mesh.tensor.size)
